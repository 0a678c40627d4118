"""A decoder with a vocabulary head: one forward pass, and the one way its weights get in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.kernels.op import are_watched
from rollout.models.blocks import Decoder, DecoderBlock
from rollout.models.config import ModelConfig
from rollout.models.determinism import check_deterministic
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build, Layer, storage_of
from rollout.models.layers.embedding import Head, VocabParallel
from rollout.models.layers.rotary import Rotary
from rollout.models.native_blocks import NativeBlocks
from rollout.models.registry import Registry
from rollout.models.slot_io import SlotIO
from rollout.models.weight_load import LoadReport, WeightLoad
from rollout.models.weight_table import WeightTable, build_table
from rollout.weights import TensorMeta, WeightSlot, WeightValue

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


class CausalLM(nn.Module):
    """One rank's instance of a model; an architecture is a subclass that makes its blocks.

    Parameters are allocated uninitialised (their padding zeroed) and keep their addresses for
    life. Nothing here takes gradients. ``table`` says what this rank takes from a checkpoint.
    """

    def __init__(self, build: Build, max_len: int, rotary: Rotary | None = None) -> None:
        super().__init__()
        config = build.config
        config.check_tensor_parallel(build.tp.size, build.expert_parallel)
        self.build, self.config, self.tp, self.max_len = build, config, build.tp, max_len
        self.rotary = rotary or Rotary(
            config.rope,
            config.head_dim,
            config.max_position_embeddings,
            max_len,
            build.dtype,
            build.device,
        )
        blocks = [self.make_block(build, index) for index in range(config.num_layers)]
        self.model = Decoder(build, blocks)
        self.lm_head = None if config.tied else Head(build)
        self.table: WeightTable = build_table(self, {HEAD: EMBEDDING} if config.tied else {})
        self.eval()

    def make_block(self, build: Build, index: int) -> DecoderBlock:
        """The decoder block number ``index``."""
        raise NotImplementedError(f"{type(self).__name__} must make its blocks")

    @functools.cached_property
    def native_blocks(self) -> NativeBlocks | None:
        """Looked for at the first forward pass, when the blocks are what they will be."""
        return NativeBlocks.of(self.build, list(self.model.layers))

    @torch.no_grad()
    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        """Logits [rows, vocab_size] of ``batch.logit_rows``, in the head's dtype, on every rank.

        Writes this step's keys and values into ``kv``, one entry per layer. Collective: all ranks
        call it in lockstep with the same batch; exactly 2 x layers + 1 all-reduces, and one
        all-gather of the logits.
        """
        cos, sin = self.rotary(batch.positions)
        x: Tensor = self.model.embed_tokens(batch.input_ids)  # [T, hidden]
        if self.native_blocks is not None and not are_watched():
            x, residual = self.native_blocks(x, cos, sin, batch, kv)
        else:
            x, residual = self.model(x, cos, sin, batch, kv)
        rows = batch.logit_rows
        x, _ = self.model.norm.add(x[rows], residual[rows])
        return self.head.logits(x)

    @property
    def head(self) -> VocabParallel:
        return self.model.embed_tokens if self.lm_head is None else self.lm_head

    def begin_load(self) -> WeightLoad:
        """A streaming load into this instance, in place; ``after_load`` runs when it finishes."""
        return WeightLoad(self.table, self.storages(), self.build.dtype, self.after_load)

    def storages(self) -> dict[str, Tensor]:
        """The memory of every parameter of ``table``, by name."""
        return {name: parameter.data for name, parameter in self.named_parameters()}

    def load_weights(self, items: Iterable[tuple[str, WeightValue]]) -> LoadReport:
        """Load a complete set; ``WeightMismatch`` names everything unknown, wrong or missing."""
        return self.begin_load().load_all(items)

    def after_load(self) -> None:
        """Re-derive everything derived from parameters, in place; called after every load."""
        for module in self.modules():
            if isinstance(module, Layer):
                module.after_load()

    def weight_metadata(self) -> tuple[TensorMeta, ...]:
        """The complete set in file form, without aliases, in the engine's dtype."""
        return tuple(
            TensorMeta(name, self.build.dtype, slots[0].shape)
            for name, slots in self.table.slots.items()
        )

    def read_slot(self, slot: WeightSlot) -> Tensor:
        """The live values of a slot, shaped like its take."""
        return self._slot_io(slot).read_box(slot, slot.take)

    def digest_slot(self, slot: WeightSlot, nonfinite: list[int] | None = None) -> int:
        """The digest of the live values of a slot, as elements of its source; see ``SlotIO``."""
        return self._slot_io(slot).digest(slot, nonfinite)

    def _slot_io(self, slot: WeightSlot) -> SlotIO:
        module, _, name = slot.param.rpartition(".")
        return SlotIO(self.table, {slot.param: storage_of(self.get_submodule(module), name)})

    def empty_like(self) -> CausalLM:
        """Another instance with its own uninitialised parameters; shares only the rope table."""
        return type(self)(self.build, self.max_len, self.rotary)


def build_model(
    config: ModelConfig,
    tp: TensorParallel,
    dtype: torch.dtype,
    device: torch.device | str,
    layout: str = "plain",
    *,
    max_model_len: int | None = None,
    expert_parallel: bool = False,
    deterministic: bool = False,
    head_dtype: torch.dtype | None = None,
    registry: Registry | None = None,
    tensors: Callable[[], Sequence[TensorMeta]] = tuple,
) -> CausalLM:
    """One rank's model with uninitialised parameters on ``device`` (``meta`` takes no memory).

    ``layout`` plain | tiles. ``max_model_len`` (default: the config's) sizes the rope table and
    settles length-dependent rope kinds; see ``Rotary``. ``expert_parallel`` deals out whole experts
    to the ranks. ``deterministic`` makes a row of logits independent of the rows beside it, bit by
    bit. ``head_dtype``: of the logits, None for ``dtype``. ``tensors`` says what the checkpoint
    holds; it is asked for a class from elsewhere alone (``foreign.py``). Raises ``ConfigError``.
    """
    build = Build(
        config=config,
        tp=tp,
        dtype=dtype,
        device=torch.device(device),
        layout=layout,
        expert_parallel=expert_parallel,
        deterministic=deterministic,
        head_dtype=head_dtype,
    )
    kind = (registry or Registry()).load(config.architecture)
    max_len = max_model_len or config.max_position_embeddings
    from rollout.models.foreign import ForeignCausalLM, is_foreign

    if deterministic:
        check_deterministic(build, kind if is_foreign(kind) else None)
    if is_foreign(kind):
        if head_dtype not in (None, dtype):
            raise ConfigError(
                f"head_dtype={head_dtype} does not reach {kind.__name__}, a model class from "
                "elsewhere: leave it at auto"
            )
        return ForeignCausalLM(build, max_len, kind, tensors())
    model = kind(build, max_len)
    assert isinstance(model, CausalLM)
    return model


def build_tables(
    config: ModelConfig,
    tp_size: int,
    dtype: torch.dtype = torch.bfloat16,
    layout: str = "plain",
    *,
    expert_parallel: bool = False,
    deterministic: bool = False,
    registry: Registry | None = None,
    tensors: Callable[[], Sequence[TensorMeta]] = tuple,
) -> list[WeightTable]:
    """Every rank's weight table, from models on ``meta``: no memory, no process group."""
    return [
        build_model(
            config,
            TensorParallel(rank, tp_size),
            dtype,
            "meta",
            layout,
            expert_parallel=expert_parallel,
            deterministic=deterministic,
            registry=registry,
            tensors=tensors,
        ).table
        for rank in range(tp_size)
    ]


__all__ = ["CausalLM", "build_model", "build_tables"]
