"""What an engine's ranks hold, as trainers are told of it before any update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from rollout.engine.core import EngineCore
from rollout.weight_sync.protocol.messages import QuantizationGrid, held_as
from rollout.weights import TensorMeta, WeightSlot
from rollout.weights.wanted import WantedWeights, by_name
from rollout.wire.codec import from_plain

_NUMERICS = ("kv_cache_dtype", "head_dtype", "deterministic")


@dataclass(frozen=True, kw_only=True)
class ServedWeights:
    """The part of ``WeightInfo`` that no update changes; see there. ``adaptable``: modules that
    adapters may change. ``staging``: what "auto" stands for.
    """

    wanted: WantedWeights
    quantized: tuple[str, ...] = ()
    adaptable: frozenset[str] = frozenset()
    grid: QuantizationGrid | None = None
    device: str
    devices: tuple[str, ...] = ()
    reaches: tuple[str, ...] = ()
    tensor_parallel_size: int
    pipeline_parallel_size: int = 1
    memory: Mapping[str, int] = field(default_factory=dict)
    undo: str = "shadow"
    staging: str = "auto"
    max_adapters: int = 0
    max_lora_rank: int = 0
    numerics: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @classmethod
    def of(cls, engine: EngineCore) -> Self:
        """Of an engine that has started: asks one rank, which speaks for all."""
        config, ranks = engine.config, engine.rank_info
        reply, _ = engine.call("weight_info", {})[0].result(config.start_timeout)
        tensors = [from_plain(TensorMeta, row) for row in reply["tensors"]]
        grid, quantized = QuantizationGrid.of(config.quantization), tuple(reply["quantized"])
        return cls(
            wanted=WantedWeights(
                dtype=tensors[0].dtype,
                tensors=by_name(tensors),
                aliases=reply["aliases"],
                prefixes=reply["prefixes"],
                spelled=tuple(from_plain(WeightSlot, row) for row in reply["spelled"]),
                schemes=held_as(grid, quantized),
            ),
            quantized=quantized,
            adaptable=frozenset(reply["adaptable"]),
            grid=grid,
            device=str(ranks[0]["device"]),
            devices=tuple(str(rank["gpu"]) for rank in ranks),
            reaches=tuple(
                str(gpu)
                for gpu in ranks[0]["reaches"]
                if all(gpu in rank["reaches"] for rank in ranks)
            ),
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            memory=engine.memory.to_dict(),
            undo=config.undo,
            staging=config.staging,
            max_adapters=max(config.max_adapters, config.max_cpu_loras),
            max_lora_rank=config.max_lora_rank if config.max_adapters else 0,
            numerics={name: str(getattr(config, name)) for name in _NUMERICS},
        )
