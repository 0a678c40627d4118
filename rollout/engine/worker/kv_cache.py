"""The pages of one rank's KV cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch

from rollout.distributed.stage import Stage
from rollout.engine.worker.state_cache import StateCache
from rollout.errors import ConfigError, EngineClosed
from rollout.models.config.model import ModelConfig
from rollout.models.config.stage_layers import own_layers
from rollout.models.decoder.kv_groups import KVGroup, kv_groups
from rollout.models.forward import ForwardBatch, HiddenPages, LayerKV

# By ``kv_cache_dtype``; of "auto" keys and values have the model's.
_CODES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """What one block holds on this rank: keys and values of ``block_size`` positions.

    Of all layers, or where layers differ in how far they reach back, of those of one of ``groups``.
    ``num_layers``: those that have pages; ``without``: the numbers of those that keep nothing,
    ``beside`` of those that have states, too. Of a stage of a pipeline all of these are of its own
    layers, counted from its first one; ``told`` are the groups of the whole model.
    ``tensors``: 2, or 1 where values are a part of the keys. ``indexed``: the layers that keep keys
    of an index of ``index_dim``, too.
    ``experts``: of a mixture, on the rank that answers, the layers that have experts and how many
    of them a token has: those are kept beside its keys and values. ``hidden``: elements of its
    hidden states, where those are kept, too; ``hidden_layers`` as of ``HiddenPages``.
    """

    num_layers: int
    tensors: int
    kv_heads: int  # of this rank
    block_size: int
    head_dim: int
    dtype: torch.dtype
    codes: torch.dtype | None = None  # of keys and values in 8 bits, which have scales
    without: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    indexed: tuple[int, ...] = ()
    index_dim: int = 0
    experts: tuple[int, int] = (0, 0)
    expert_dtype: torch.dtype = torch.uint8
    hidden: int = 0
    hidden_layers: tuple[int, ...] = ()
    groups: tuple[KVGroup, ...] = ()  # none: one, of all layers
    told: tuple[tuple[int, int, int], ...] = ()  # as ``groups_told`` takes them

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        ranks: int,
        block_size: int,
        dtype: torch.dtype,
        sparse_layers: int = 0,
        kv_cache_dtype: str = "auto",
        *,
        hidden_layers: tuple[int, ...] | None = None,
        stage: Stage | None = None,
    ) -> Self:
        """Of each of the ``ranks`` of a stage; ``ConfigError`` where the model cannot have such
        blocks.

        ``hidden_layers``: as of ``HiddenPages``; None: no hidden state is kept.
        """
        model.check_blocks(block_size)
        tensors, heads, elements = model.cached_heads(ranks)
        moe = model.moe if sparse_layers else None
        index = None if model.latent is None else model.latent.index
        stage = stage or Stage()
        paged = own_layers(model, stage, model.paged_layers)
        states = own_layers(model, stage, model.recurrent_layers)
        groups = kv_groups(model)
        return cls(
            num_layers=len(paged), without=own_layers(model, stage, model.feeding_layers),
            tensors=tensors, beside=tuple(i for i in states if i in paged),
            indexed=model.indexed_layers, index_dim=0 if index is None else index.dim,
            kv_heads=heads, block_size=block_size, head_dim=elements, dtype=dtype,
            codes=_CODES.get(kv_cache_dtype),
            experts=(0, 0) if moe is None else (sparse_layers, moe.experts_per_token),
            expert_dtype=torch.uint8 if moe is None or moe.num_experts <= 256 else torch.int16,
            hidden=0 if hidden_layers is None else max(1, len(hidden_layers)) * model.hidden_size,
            hidden_layers=hidden_layers or (),
            groups=tuple(
                replace(group, layers=own_layers(model, stage, group.layers)) for group in groups
            ),
            told=tuple((len(group.layers), group.window, group.chunk) for group in groups),
        )  # fmt: skip

    @classmethod
    def of_draft(
        cls,
        model: ModelConfig,
        ranks: int,
        block_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str = "auto",
    ) -> Self:
        """Of a draft model: one block table, of the policy's, is for all its layers."""
        shape = cls.of(model, ranks, block_size, dtype, kv_cache_dtype=kv_cache_dtype)
        return replace(shape, groups=(), told=())

    @property
    def page_layers(self) -> int:
        """How many layers have their keys and values in one block."""
        return max((len(group.layers) for group in self.groups), default=self.num_layers)

    def bytes_read(self, lengths: torch.Tensor) -> int:
        """Of keys and values, by attention of one token at the end of each of ``lengths``."""
        groups = self.groups or (KVGroup(layers=(0,) * self.num_layers),)
        places = sum(len(group.layers) * group.reach(lengths) for group in groups)
        return places * self._layer_bytes // self.block_size

    @property
    def block_bytes(self) -> int:
        kept = self.experts[0] * self.experts[1] * self.expert_dtype.itemsize
        kept += (len(self.indexed) * self.index_dim + self.hidden) * self.dtype.itemsize
        return self.page_layers * self._layer_bytes + self.block_size * kept

    @property
    def _layer_bytes(self) -> int:
        kept = self.dtype.itemsize * self.head_dim
        if self.codes is not None:
            kept = self.codes.itemsize * self.head_dim + torch.float32.itemsize
        return self.tensors * self.kv_heads * self.block_size * kept


class KVCache:
    """Allocates the pages, and drops and takes them again around a sleep; so with ``states``, and
    with the pages of a ``draft`` model, which has as many blocks.

    Contents are uninitialised and do not survive a sleep. Allocated once, not per step.
    """

    def __init__(
        self,
        shape: KVShape,
        device: torch.device,
        states: StateCache | None = None,
        draft: KVCache | None = None,
    ) -> None:
        self.shape, self.device, self.states, self.draft = shape, device, states, draft
        self.num_blocks = 0
        self._layers: list[LayerKV] = []
        self.experts: torch.Tensor | None = None  # [slots + 1, *shape.experts]
        self.hidden: HiddenPages | None = None  # of [slots + 1, shape.hidden]

    @property
    def layers(self) -> list[LayerKV]:
        """One entry per layer that is here; ``EngineClosed`` while there are none."""
        if not self._layers:
            raise EngineClosed("this rank has no KV cache: the engine is asleep or not started")
        return self._layers

    def beside(self, batch: ForwardBatch) -> ForwardBatch:
        """``batch``, with the pages of what is kept of whole tokens."""
        return replace(batch, expert_pages=self.experts, hidden_pages=self.hidden)

    @property
    def block_bytes(self) -> int:
        """Of one block, a draft model's included."""
        return self.shape.block_bytes + (0 if self.draft is None else self.draft.block_bytes)

    @property
    def token_bytes(self) -> int:
        """Of one token in all groups, which it takes until it is out of a window."""
        return max(len(self.shape.groups), 1) * self.block_bytes // self.shape.block_size

    @property
    def told_groups(self) -> list[list[int]]:
        """As ``groups_told`` takes them. A draft model goes by the last group's table, and reads a
        sequence from its first token on: that group keeps every position for it.
        """
        told = list(map(list, self.shape.told))
        if self.draft is not None:
            told[-1][1:] = 0, 0
        return told

    def allocate(self, num_blocks: int, num_states: int = 0) -> None:
        """Take ``num_blocks`` blocks, and as many slots of states, in place of any there were."""
        shape = self.shape
        self.free()
        try:
            self._layers = [self._pages(layer, num_blocks) for layer in range(shape.page_layers)]
            if len(shape.groups) > 1:
                of = {layer: i for group in shape.groups for i, layer in enumerate(group.layers)}
                self._layers = [self._layers[of[layer]] for layer in sorted(of)]
            rows = num_blocks * shape.block_size + 1  # the last: of what has no place
            if shape.hidden:
                pages = torch.empty(rows, shape.hidden, dtype=shape.dtype, device=self.device)
                self.hidden = HiddenPages(pages, shape.hidden_layers)
            if shape.experts[0]:
                self.experts = torch.zeros(
                    rows, *shape.experts, dtype=shape.expert_dtype, device=self.device
                )
        except RuntimeError as error:
            self.free()
            need = num_blocks * self.block_bytes
            raise ConfigError(
                f"no memory for {num_blocks} KV blocks ({need / 2**20:.0f} MiB); set a smaller "
                f"kv_cache_bytes or num_kv_blocks ({error})"
            ) from error
        if self.states is not None:
            self.states.allocate(num_states)
            others = dict.fromkeys(shape.without, LayerKV(torch.empty(0), torch.empty(0)))
            for layer, slots in sorted((others | self.states.layers).items()):
                if layer in shape.beside:
                    self._layers[layer] = replace(self._layers[layer], beside=slots)
                else:
                    self._layers.insert(layer, slots)
        if self.draft is not None:
            self.draft.allocate(num_blocks)
        self.num_blocks = num_blocks

    def _pages(self, layer: int, num_blocks: int) -> LayerKV:
        shape = self.shape
        dtype, size = shape.codes or shape.dtype, (num_blocks, shape.kv_heads, shape.block_size)
        k = torch.empty(*size, shape.head_dim, dtype=dtype, device=self.device)
        pages = LayerKV(k, k if shape.tensors == 1 else torch.empty_like(k))
        if shape.codes is not None:
            scales = torch.empty(size, dtype=torch.float32, device=self.device)
            others = scales if shape.tensors == 1 else torch.empty_like(scales)
            pages = replace(pages, k_scales=scales, v_scales=others)
        if layer in shape.indexed:
            keys = (num_blocks, 1, shape.block_size, shape.index_dim)
            index = torch.empty(keys, dtype=shape.dtype, device=self.device)
            pages = replace(pages, index=index)
        return pages

    def free(self) -> None:
        """Drop the pages; ``num_blocks`` remembers how many to take again."""
        self._layers, self.experts, self.hidden = [], None, None
        if self.states is not None:
            self.states.free()
        if self.draft is not None:
            self.draft.free()

    def restore(self) -> None:
        """After ``free``: take as many blocks as before."""
        if not self._layers and self.num_blocks:
            self.allocate(self.num_blocks, 0 if self.states is None else self.states.num_slots)
