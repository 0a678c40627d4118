"""``rollout check``: everything that can be known about serving a model without its weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from math import prod
from pathlib import Path

import torch

from rollout.config import EngineConfig
from rollout.distributed import TensorParallel, check_dtype, choose_device
from rollout.distributed.stage import Stage
from rollout.engine.memory import available_bytes, total_bytes
from rollout.engine.memory_plan import (
    KVSize,
    MemoryPlan,
    mib,
    plan_memory,
    served_length,
    size_kv,
)
from rollout.engine.resolved_model import ResolvedModel
from rollout.engine.tokenizer import Tokenizer
from rollout.engine.worker.graphs.decode_graphs import check_graphs
from rollout.engine.worker.held_component import HeldComponent, head_behind
from rollout.engine.worker.kv_cache import KVCache, KVShape
from rollout.engine.worker.state_cache import StateShape
from rollout.errors import ConfigError, WeightMismatch, some
from rollout.kernels.native import library, native_status
from rollout.loader import open_location
from rollout.models.build import build_model, build_tables, check_kv_codes, slots_beside
from rollout.models.config.model import ModelConfig
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.prediction.head import PredictionHead
from rollout.models.transformers_backend.ranks import OverRanks
from rollout.models.weight_io.table import WeightTable, check_tables
from rollout.weights import Box, TensorMeta
from rollout.weights.names import is_idle_bias, placed
from rollout.wire.frames import dtype_name


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What a model is on any machine; sizes are bytes of one rank (the largest), ``rank_bytes`` of
    each, components included. ``held``: how linears are; ``components``: what is beside the model;
    ``positions``: where they are not transformers', else empty.
    """

    architecture: str
    served: str
    ranks: int
    dtype: str
    num_tensors: int
    num_elements: int
    kv_bytes_per_token: int
    files: str
    held: str
    components: tuple[str, ...]
    tokenizer: str
    positions: str
    rank_bytes: tuple[int, ...]
    tables: tuple[WeightTable, ...]

    def shape_lines(self) -> list[str]:
        """Every parameter of every rank: its shape there, and the tensors whose parts it takes."""
        lines = []
        for rank, table in enumerate(self.tables):
            sources: dict[str, list[str]] = {name: [] for name in table.params}
            for slot in (slot for slots in table.slots.values() for slot in slots):
                if slot.take.numel:
                    sources[slot.param].append(f"{slot.source}{slot.take}")
            for name, spec in table.params.items():
                held = self.dtype if spec.scheme is None else spec.scheme.name
                taken = ", ".join(sources[name]) or "nothing"
                lines.append(f"rank {rank}: {name} {list(spec.shape)} {held} <- {taken}")
        return lines

    def lines(self) -> list[str]:
        """For people, one fact a line."""
        return [
            f"architecture   {self.architecture}, {self.num_elements / 1e6:.1f} M parameters",
            f"served         {self.served}",
            f"ranks          {self.ranks}, {self.dtype}; every rank's weight table is whole",
            f"weights        {self.held}; "
            + ", ".join(f"rank {n}: {mib(size)}" for n, size in enumerate(self.rank_bytes)),
            *(f"component      {component}" for component in self.components),
            f"checkpoint     {self.num_tensors} tensors, {self.files}",
            f"tokenizer      {self.tokenizer}",
            *([f"positions      {self.positions}"] if self.positions else []),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight(Examined):
    """What ``check`` found on this machine."""

    size: KVSize
    free_bytes: int
    memory: MemoryPlan
    kernels: str

    def lines(self) -> list[str]:
        return [*Examined.lines(self), *self.machine_lines()]

    def machine_lines(self) -> list[str]:
        return [
            f"memory         {self.memory}, {self.kv_bytes_per_token} bytes a token; "
            f"{mib(self.free_bytes)} free on this machine",
            f"sequences      up to {self.size.max_model_len} tokens; {self.size.num_blocks} KV "
            "blocks" + (f"; {self.size.windows}" if self.size.windows else ""),
            f"kernels        {self.kernels}",
        ]


def check(config: EngineConfig, told: Callable[[Examined], None] = lambda _: None) -> Preflight:
    """Judge ``config`` on this machine; reads headers of the weight files only.

    ``told`` is called with what is so on any machine, before this one's memory is asked. Raises the
    error that starting the engine would raise, or ``WeightMismatch`` naming the tensors that are
    missing, unknown or misshapen.
    """
    device = choose_device(config.device)
    check_graphs(config, device)
    found = ResolvedModel.of(config)
    config = found.settled(config)
    model = found.config
    dtype = found.dtype_of(config)
    check_dtype(device, dtype)
    tables = _tables(config, found, dtype)
    policy = cache(lambda: _model(config, found, dtype))
    if config.kv_cache_dtype != "auto":
        check_kv_codes(policy(), config.kv_cache_dtype)
    beside = {name: _Beside.of(config, found, dtype, name) for name in config.components}
    if (name := config.draft_component) is not None:
        head_behind(name, beside[name].models[0], policy().policy)
    kv = _pages(config, model, dtype, beside)
    examined = _examined(config, found, dtype, tables, kv, beside)
    told(examined)
    free, on_cpu = available_bytes(device), device.type == "cpu"
    together = sum if on_cpu else max  # ranks of one host share its memory
    taken = together(examined.rank_bytes)
    if taken > free:
        raise ConfigError(
            f"too little memory for the weights: {mib(taken)} are needed, {mib(free)} are free"
        )
    stages = [stage for stage in _stages(config) for _ in range(config.tensor_parallel_size)]
    adapters = [0] * len(stages)
    if config.max_adapters:
        each = [_adapter_bytes(config, found, dtype, stage) for stage in _stages(config)]
        adapters = [each[stage.index] for stage in stages]
    slots = together(adapters)
    if slots > free - taken:
        raise ConfigError(
            f"too little memory for the slots of max_adapters={config.max_adapters} of "
            f"max_lora_rank={config.max_lora_rank}: {mib(slots)} are needed, {mib(free - taken)} "
            "are free beside the weights; lower either"
        )
    ranks = [
        {
            "free_bytes": free - (taken + slots if on_cpu else weight_bytes + adapter_bytes),
            "total_bytes": total_bytes(device),
            "host_free_bytes": available_bytes(torch.device("cpu")),
            "weight_bytes": weight_bytes,
            "pending_bytes": table.pending * dtype.itemsize,
            "adapter_bytes": adapter_bytes,
            "kv_block_bytes": kv[stage.index].block_bytes,
            "kv_groups": kv[0].told_groups,
            "state_slot_bytes": StateShape.of(
                model, config.tensor_parallel_size, dtype, stage
            ).slot_bytes,
            "device": str(device),
        }
        for stage, table, weight_bytes, adapter_bytes in zip(
            stages, tables, examined.rank_bytes, adapters, strict=True
        )
    ]
    size = size_kv(config, model.max_position_embeddings, ranks)
    return Preflight(
        **{field.name: getattr(examined, field.name) for field in fields(examined)},
        size=size, free_bytes=free, memory=plan_memory(config, size, ranks),
        kernels=_kernels() if device.type == "cpu" else f"torch on {device}",
    )  # fmt: skip


def _examined(
    config: EngineConfig,
    found: ResolvedModel,
    dtype: torch.dtype,
    tables: Sequence[WeightTable],
    kv: Sequence[KVCache],
    beside: Mapping[str, _Beside],
) -> Examined:
    model, dummy = found.config, config.load_format == "dummy"
    more = [sum(each) for each in zip(*(one.rank_bytes for one in beside.values()), strict=True)]
    more += [0] * (len(tables) - len(more))
    return Examined(
        architecture=model.architecture,
        served=_served(model),
        ranks=config.num_ranks,
        dtype=dtype_name(dtype),
        tables=tuple(tables),
        num_tensors=len(tables[0].slots),
        num_elements=sum(prod(tables[0].shape_of(name)) for name in tables[0].slots),
        rank_bytes=tuple(
            _rank_bytes(table, dtype) + others for table, others in zip(tables, more, strict=True)
        ),
        components=tuple(f"{name}: {one.told}" for name, one in beside.items()),
        held=_held(config, found, dtype_name(dtype)),
        tokenizer=_tokenizer(found.load_tokenizer(config)),
        kv_bytes_per_token=max(pages.token_bytes for pages in kv),
        positions=_positions(model, config.max_model_len or model.max_position_embeddings),
        files="made up" if dummy else "names and shapes as the tables want them",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Beside:
    """A component: where its files are, and its model on each rank, on ``meta``."""

    directory: Path
    config: ModelConfig | None
    models: tuple[Model, ...]
    longest: int | None  # that it drafts for; None: it is held alone

    @classmethod
    def of(
        cls, config: EngineConfig, found: ResolvedModel, dtype: torch.dtype, name: str
    ) -> _Beside:
        ranks, longest = config.tensor_parallel_size, None
        first = TensorParallel(0, ranks)
        directory = found.component(config, name)
        held = HeldComponent.at(name, directory, first, config.expert_parallel)
        if name == config.draft_component:
            wanted = served_length(config, found.config.max_position_embeddings)
            longest = held.longest(name, wanted)
        models = [
            held.build(
                Build(
                    config=found.config,
                    tp=TensorParallel(rank, ranks),
                    dtype=dtype,
                    device=torch.device("meta"),
                    expert_parallel=config.expert_parallel,
                ),
                longest,
            )
            for rank in range(ranks)
        ]
        cut = held.config is not None or longest is not None  # not held as the files have it
        if cut and config.load_format != "dummy":
            _check_files(config, held.directory, models[0].table)
        return cls(
            directory=held.directory, config=held.config, models=tuple(models), longest=longest
        )

    @property
    def rank_bytes(self) -> tuple[int, ...]:
        """Of the ranks of the first stage: others have nothing of it."""
        return tuple(
            sum(p.numel() * p.element_size() for p in model.parameters()) for model in self.models
        )

    @property
    def told(self) -> str:
        table = self.models[0].table
        count = sum(prod(table.shape_of(name)) for name in table.slots)
        what = "tensors" if self.config is None else self.config.architecture
        if isinstance(self.models[0], PredictionHead):
            what = self.models[0].told
        use = "held" if self.longest is None else f"drafts for up to {self.longest} tokens"
        return f"{what}, {count / 1e6:.1f} M parameters, {use}"


def _pages(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, beside: Mapping[str, _Beside]
) -> list[KVCache]:
    """Of a rank of each stage, without their memory."""
    ranks, block_size = config.tensor_parallel_size, config.block_size
    draft, device, reads = None, torch.device("meta"), None
    if config.draft_component is not None:
        drafting = beside[config.draft_component].models[0]
        reads = drafting.reads if isinstance(drafting, PredictionHead) else None
        shape = KVShape.of_draft(drafting.config, ranks, block_size, dtype, config.kv_cache_dtype)
        draft = KVCache(shape, device)
    caches = []
    for stage in _stages(config):
        sparse = _sparse_layers(model) if stage.is_first else 0
        shape = KVShape.of(
            model, ranks, block_size, dtype, sparse, config.kv_cache_dtype,
            hidden_layers=reads if stage.is_first else None, stage=stage,
        )  # fmt: skip
        caches.append(KVCache(shape, device, draft=draft if stage.is_first else None))
    return caches


def _stages(config: EngineConfig) -> list[Stage]:
    count = config.pipeline_parallel_size
    return [Stage(index, count) for index in range(count)]


def _tokenizer(found: Tokenizer | None) -> str:
    if found is None:
        return "none: requests bring token ids"
    return f"{len(found)} tokens, {'with' if found.chat_template else 'without'} a chat template"


def _positions(model: ModelConfig, longest: int) -> str:
    """What is to be known of rope that transformers chooses by a sequence's length."""
    short = max((layer.rope.differs_up_to(longest) for layer in model.layers), default=0)
    if not short:
        return ""
    return (
        f"longrope: the long factors for every sequence, as max_model_len is {longest}; "
        f"transformers has the short ones up to {short} tokens (--max-model-len {short} serves "
        "those as it does)"
    )


def _sparse_layers(model: ModelConfig) -> int:
    """How many layers have experts whose numbers are kept with the tokens."""
    moe = model.moe if model.hf_values is None else None
    if moe is None:
        return 0
    if model.arch.lone:
        return sum(layer.feeds == "moe" for layer in model.layers[: model.num_layers])
    return sum(map(moe.is_sparse, range(model.num_layers)))


def _tables(
    config: EngineConfig, found: ResolvedModel, dtype: torch.dtype
) -> Sequence[WeightTable]:
    """Every rank's, whole together and as the files have their tensors."""
    model = found.config
    model.check_tensor_parallel(config.tensor_parallel_size, config.expert_parallel)
    tables = build_tables(
        model,
        config.tensor_parallel_size,
        dtype,
        config.weight_layout,
        stages=config.pipeline_parallel_size,
        max_model_len=config.max_model_len,
        expert_parallel=config.expert_parallel,
        deterministic=config.deterministic,
        quantization=config.quantization,
        registry=found.registry,
        tensors=lambda: _headers(config, found),
    )
    check_tables(tables)
    if config.load_format != "dummy":
        _check_files(config, found.location, tables[0])
    return tables


def _model(
    config: EngineConfig, found: ResolvedModel, dtype: torch.dtype, stage: Stage | None = None
) -> Model:
    """Of the first rank, or of that of a stage, without its memory."""
    return build_model(
        found.config,
        TensorParallel(0, config.tensor_parallel_size),
        dtype,
        "meta",
        expert_parallel=config.expert_parallel,
        registry=found.registry,
        tensors=lambda: _headers(config, found),
        stage=stage or _stages(config)[0],
    )


def _adapter_bytes(
    config: EngineConfig, found: ResolvedModel, dtype: torch.dtype, stage: Stage
) -> int:
    """Of all slots for adapters on a stage's first rank, which are there from the start."""
    made = slots_beside(
        _model(config, found, dtype, stage),
        config.max_adapters,
        config.max_lora_rank,
        vocabulary=config.lora_embeddings,
        experts=config.lora_experts,
    )
    return made.nbytes


def _served(model: ModelConfig) -> str:
    if model.over_ranks is not None:
        ranks = _ranks(model.over_ranks)
        return f"by transformers: its own modules, their attention over pages; {ranks}"
    if not (count := len(model.labels)):
        return "natively"
    labels = "1 label: a reward model, or a classifier" if count == 1 else f"{count} labels"
    return f"natively, to classify: a score head of {labels}"


def _ranks(over: OverRanks) -> str:
    """By whose plan ranks share what runs as transformers' modules, and how many can."""
    *most, last = over.fitting()
    if not most:
        return f"on one rank ({over.why_not(2)})"
    sizes = f"{', '.join(map(str, most))} or {last}"
    missing = next((n for n in (2, 4, 8) if over.why_not(n)), 0)
    why = f" ({missing}: {over.why_not(missing)})" if missing else ""
    return f"on {sizes} ranks{why}, cut by {over.whole.planned_by}"


def _held(config: EngineConfig, found: ResolvedModel, dtype: str) -> str:
    """How linears are held: what was asked for, and what the files have."""
    asked, own = config.quantization, found.config.quantization
    if asked == own:
        return dtype if own == "none" else f"{own}, the files' own codes"
    if asked == "none":
        kept = found.settled(replace(config, quantization="auto")).quantization == own
        hint = " (--quantization auto keeps what the files have)" if kept else ""
        return f"{dtype}, dequantised from {own}{hint}"
    return f"{asked}, made of what the files stand for"


def _kernels() -> str:
    """Which code a forward pass on this CPU runs; "level" is of the packed linear layers."""
    from rollout.kernels.linear import cpu

    status = native_status()
    if library() is None:
        return status
    return f"{status}; {cpu.LEVELS[cpu.level()]} in linear layers"


def _headers(config: EngineConfig, found: ResolvedModel) -> tuple[TensorMeta, ...]:
    with open_location(found.location, config.load_format) as checkpoint:
        return checkpoint.metadata()


def _check_files(config: EngineConfig, location: str | Path, table: WeightTable) -> None:
    """The files' tensors against the table: all mistakes in one error."""
    with open_location(str(location), config.load_format) as checkpoint:
        held = {
            name: shape
            for sent, value in checkpoint.items()
            if (own := placed(sent, table.prefixes)) is not None
            and not is_idle_bias(own, table.slots, partial(value.read, Box.full(value.shape)))
            for name, shape in table.spellings.split_shape(own, tuple(value.shape))
        }
    problems = []
    if missing := sorted(set(table.slots) - set(held)):
        problems.append(f"missing {some(missing)}")
    unknown = [n for n in held if n not in table.slots and n not in table.aliases]
    if unknown := sorted(name for name in unknown if not table.ignores(name)):
        problems.append(f"unknown {some(unknown)}")
    for name in sorted(set(held) & {*table.slots, *table.aliases}):
        if tuple(held[name]) != tuple(table.shape_of(name)):
            problems.append(f"{name} is {list(held[name])}, not {list(table.shape_of(name))}")
    if problems:
        what = f"the files of {location} do not fit: {some(problems, between='; ')}"
        raise WeightMismatch(what, problems=problems)


def _rank_bytes(table: WeightTable, dtype: torch.dtype) -> int:
    """Bytes of one rank's parameters as they lie in memory."""
    return sum(spec.nbytes(dtype) for spec in table.params.values())
