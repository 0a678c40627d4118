"""One rank's instance of a model, as the engine and weight updates see it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.kernels import digest_regions
from rollout.kernels.region_table import RegionTables
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build, Layer
from rollout.models.weight_io.known_bucket import KnownBucket
from rollout.models.weight_io.load import LoadReport, WeightLoad
from rollout.models.weight_io.quantized import QuantizedIO
from rollout.models.weight_io.slots import Regions, SlotIO
from rollout.models.weight_io.table import DIGESTS, WeightTable
from rollout.weights import TensorMeta, WeightSlot, WeightValue
from rollout.weights.names import weight_dtype

_MOST_REGIONS = 64  # lists of slots whose places are kept


class Model(nn.Module):
    """A table of slots, the parameters that they fill, and a forward pass; of our making
    (``CausalLM``) or not (``ForeignCausalLM``).

    Parameters are allocated uninitialised (their padding zeroed) and keep their addresses for
    life. Nothing here takes gradients. ``table`` says what this rank takes from a checkpoint.
    ``forward(batch, kv)`` gives logits [rows, vocab_size], in lockstep on all ranks.
    """

    table: WeightTable
    gives_hidden_states = False
    comes_with_policy = False  # of a component: its tensors may come among the policy's
    captures_prompts = False  # whether a graph can hold ``hidden_states`` of a step with prompts
    constants: Mapping[str, Tensor] = MappingProxyType({})  # of its files: saved, never updated
    sparse_layers: tuple[bool, ...] = ()  # for each layer whether it has experts that can be told

    def __init__(self, build: Build, max_len: int) -> None:
        super().__init__()
        build.config.check_tensor_parallel(build.tp.size, build.expert_parallel)
        self.build, self.config, self.tp, self.max_len = build, build.config, build.tp, max_len
        self.region_tables = RegionTables()
        self.known: dict[int, KnownBucket] = {}  # by index, of the last update
        self._regions: dict[tuple[int, ...], Regions] = {}
        self._held: dict[str, nn.Parameter] = {}

    @property
    def policy(self) -> Model:
        """The model that runs: itself, but for one of several components."""
        return self

    @property
    def owner(self) -> nn.Module:
        """The module whose parameters the table names."""
        return self

    def empty_like(self) -> Self:
        """Another instance with its own uninitialised parameters."""
        raise NotImplementedError

    def with_hidden_states(
        self, batch: ForwardBatch, kv: Sequence[LayerKV], count: int
    ) -> tuple[Tensor, Tensor]:
        """The logits of ``forward`` of the first ``count`` rows, and [rows, hidden size] what those
        of all rows are made of, after the last norm, whole on every rank; of a classifier what its
        head makes of that, [rows, labels]. Where ``gives_hidden_states``; in lockstep, as
        ``forward``.
        """
        raise NotImplementedError

    def after_load(self) -> None:
        """Re-derive everything derived from parameters, in place; called after every load."""
        for layer in self._own_layers:
            layer.after_load()

    @cached_property
    def _own_layers(self) -> list[Layer]:
        """Looked for after the first load; none comes or goes then."""
        return [module for module in self.modules() if isinstance(module, Layer)]

    def contents_moved(self) -> None:
        """The parameters hold what others held: what adapters make of them is derived anew."""

    def derive_adapters(self) -> None:
        """Derive what slots of adapters have to know of the parameters, both being there."""

    def begin_load(self) -> WeightLoad:
        """A streaming load into this instance, in place; ``after_load`` runs when it finishes."""
        return WeightLoad(
            self.table,
            self.storages(),
            self.build.dtype,
            self.after_load,
            tables=self.region_tables,
        )

    def load_weights(self, items: Iterable[tuple[str, WeightValue]]) -> LoadReport:
        """Load a complete set; ``WeightMismatch`` names everything unknown, wrong or missing."""
        return self.begin_load().load_all(items)

    def storages(self) -> dict[str, Tensor]:
        """The memory of every parameter of ``table``, by name."""
        return {name: parameter.data for name, parameter in self.held_parameters().items()}

    def held_parameters(self) -> Mapping[str, nn.Parameter]:
        """By name; searched for once, as none comes or goes after the first load."""
        if not self._held:
            self._held = dict(self.owner.named_parameters())
        return self._held

    def forget_places(self) -> None:
        """Its parameters are about to lie elsewhere: nothing holds on to where they were."""
        self.region_tables.clear()
        self.known.clear()
        self._regions.clear()

    def weight_metadata(self) -> tuple[TensorMeta, ...]:
        """The complete set in file form, without aliases, in the engine's dtype."""
        return tuple(
            TensorMeta(name, weight_dtype(name, self.build.dtype), slots[0].shape)
            for name, slots in self.table.slots.items()
        )

    def read_slot(self, slot: WeightSlot) -> Tensor:
        """The live values of a slot, shaped like its take; of a quantised one dequantised."""
        if slot in self.table.quantized:
            return self._quantized_io().read(slot)
        return self._slot_io(slot).read_box(slot, slot.take)

    def digest_slot(self, slot: WeightSlot, nonfinite: list[int] | None = None) -> int:
        """The digest of the live values of a slot, as elements of its source; see ``SlotIO``.

        Of a quantised slot that of the values which its codes were made from, as long as they have
        the bits that they had then; ``as_sent`` says of which box.
        """
        if slot in self.table.quantized:
            return self._quantized_io().digest(slot, nonfinite)
        return self._slot_io(slot).digest(slot, nonfinite)

    def as_sent(self, slot: WeightSlot) -> WeightSlot:
        """The slot, taking all that ``digest_slot`` is about."""
        if slot not in self.table.quantized:
            return slot
        return replace(slot, take=self.table.sent_box(slot))

    def live_digest(self, slot: WeightSlot) -> int:
        """The digest of a slot as it is held: of a quantised one its codes and scales."""
        if slot in self.table.quantized:
            return self._quantized_io().live_digest(slot)
        return self._slot_io(slot).digest(slot)

    def written_digests(self) -> list[tuple[WeightSlot, int]]:
        """Of each quantised slot ``live_digest`` as it was when it was written."""
        if not self.table.quantized:
            return []
        io = self._quantized_io()
        return [(slot, io.recorded(slot)) for slot in self.table.quantized]

    def _quantized_io(self) -> QuantizedIO:
        return QuantizedIO(self.table, self.storages(), self.build.dtype)

    def keep_digests(self) -> None:
        """Own the digests of quantised slots; ``ConfigError`` where ranks would cut blocks."""
        for slot in self.table.quantized:
            scheme = self.table.scheme(slot)
            if (fault := scheme.fault(slot.shape, slot.take)) is not None:
                raise ConfigError(
                    f"quantization={scheme.name!r} has blocks of {scheme.rows} x {scheme.columns}, "
                    f"and of {slot.source} {fault}; choose another tensor_parallel_size, or int8 "
                    "or fp8, whose scales are of whole rows"
                )
        if self.table.quantized:
            digests = torch.zeros(
                len(self.table.quantized), 3, dtype=torch.int64, device=self.build.device
            )
            self.register_parameter(DIGESTS, nn.Parameter(digests, requires_grad=False))
            self._held = {}

    def digest_slots(self, slots: Sequence[WeightSlot]) -> list[tuple[int, int]]:
        """As ``digest_slot`` of many, and how many of each one's values are NaN or infinite; on a
        device in few launches.
        """
        key = tuple(map(id, slots))  # those of the table, which live as long as it does
        if key not in self._regions:
            if len(self._regions) >= _MOST_REGIONS:
                self._regions.clear()
            self._regions[key] = SlotIO(self.table, self.storages()).regions(slots)
        values, places = self._regions[key]
        return digest_regions(values, places, self.region_tables) if values else []

    def _slot_io(self, slot: WeightSlot) -> SlotIO:
        return SlotIO(self.table, {slot.param: self.owner.get_parameter(slot.param).data})
