"""Which tokens of a trainer's batch are one sequence: padded on either side, packed, or both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from torch import Tensor

from rollout.errors import InvalidRequest
from rollout.kernels import batch_invariant_attention, paged_attention, rope_and_cache
from rollout.models.layers.attention import Attention, CosSin, apart
from rollout.models.layers.rotary import Rotary
from rollout.trainer_ops.functions import Run, through

BLOCK = 16  # of the pages that a forward pass makes for itself; no bit depends on it


def number_sequences(
    like: Tensor, mask: Tensor | None, positions: Tensor | None, longest: int
) -> tuple[Tensor, Tensor]:
    """``(numbers, positions)`` of a batch as ``like`` [samples, tokens], both int64.

    mask: 0 for padding; positions: as the caller gives them, by default those of rows that hold one
    sequence each. Numbers count sequences from 1, padding has 0. A sequence is a run of tokens
    whose positions count from 0, at most ``longest`` of them. ``InvalidRequest`` where tokens are
    of none.
    """
    shape = like.shape
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != shape):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise InvalidRequest(
            f"attention_mask {got} for tokens {list(shape)}: give one value for each token, 0 for "
            "padding; sequences that are packed are told by position_ids"
        )
    real = torch.ones(shape, dtype=torch.bool) if mask is None else mask != 0
    if positions is None:
        positions = real.long().cumsum(-1) - 1
    positions = torch.where(real, positions.expand(shape), 0)
    starts = real & (positions == 0)
    follows = torch.zeros_like(real)
    follows[:, 1:] = real[:, :-1] & (positions[:, 1:] == positions[:, :-1] + 1)
    if (lost := real & ~starts & ~follows).any():
        row, at = (int(i) for i in lost.nonzero()[0])
        raise InvalidRequest(
            f"token {at} of sample {row}, at position {int(positions[row, at])}, goes on from no "
            "token: each sequence is one run of tokens without padding inside, and its "
            "position_ids count from 0"
        )
    if not real.any() or positions.max() >= longest:
        length = int(positions.max()) + 1 if real.any() else 0
        raise InvalidRequest(f"a sequence of {length} tokens: 1 to {longest} (max_model_len) go")
    return starts.flatten().cumsum(0).view(shape) * real, positions


@dataclass(frozen=True, slots=True)
class Layers:
    """How an engine's layers attend, and its rope tables; ``rotary_of``: which a layer has."""

    attentions: Sequence[Attention]
    rotaries: Sequence[Rotary]
    rotary_of: Sequence[int]

    @property
    def max_len(self) -> int:
        return self.rotaries[0].max_len


@dataclass(frozen=True, slots=True)
class Sequences:
    """The sequences of one forward pass: their rows, and KV pages of their own."""

    shape: torch.Size  # of the batch: [samples, tokens]
    rows: Tensor  # [real tokens] int64: where they are among all tokens of the batch
    slots: Tensor  # [real tokens] int64: page x BLOCK + offset
    starts: Tensor  # [sequences + 1] int32
    lengths: Tensor  # [sequences] int32
    tables: Tensor  # [sequences, most pages] int32
    pages: int
    attentions: Sequence[Attention]  # the engine's, of each layer: how it attends
    cos_sins: Sequence[CosSin]  # of each layer: cos and sin of the real tokens, [real tokens, dims]

    @classmethod
    def of(cls, numbers: Tensor, positions: Tensor, layers: Layers) -> Self:
        """As ``number_sequences`` gives them."""
        flat = numbers.flatten()
        rows = flat.nonzero()[:, 0]
        lengths = flat.bincount()[1:]  # numbers count from 1, without a gap
        starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        pages = (lengths + BLOCK - 1) // BLOCK
        first = pages.cumsum(0) - pages  # page of each sequence
        inside = positions.flatten()[rows]
        slots = first.repeat_interleave(lengths) * BLOCK + inside
        most, count = int(pages.max()), int(pages.sum())
        tables = (first[:, None] + torch.arange(most)).clamp(max=count - 1)
        places = (starts.int(), lengths.int(), tables.int())
        cos_sins = [rotary(inside) for rotary in layers.rotaries]
        by_layer = [cos_sins[i] for i in layers.rotary_of]
        return cls(numbers.shape, rows, slots, *places, count, layers.attentions, by_layer)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor) -> Tensor:
        """Turn q and k, and attend in every sequence by itself, by the ops that the engine runs.

        q: [samples, heads, tokens, dim], k and v of KV heads; sinks: a score of each head. Returns
        [samples, tokens, heads, dim], zeros for padding.
        """
        run = partial(self._by, rope_and_cache, batch_invariant_attention, layer)
        plain = partial(self._by, rope_and_cache.reference, paged_attention.reference, layer)
        return through(run, plain, q, k, v, *sinks)

    def _by(
        self,
        rotate: Run,
        attend: Run,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:
        how = self.attentions[layer]
        q, k, v = (x.transpose(1, 2).flatten(0, 1)[self.rows] for x in (q, k, v))
        if how.rotated:
            q, k = apart(q, how.rotated), apart(k, how.rotated)
        shape = (self.pages, k.shape[1], BLOCK, k.shape[2])
        pages = (k.new_zeros(shape), v.new_zeros(shape))
        rotated = rotate(q, k, v, *self.cos_sins[layer], *pages, self.slots)
        out = attend(
            rotated,
            *pages,
            self.starts,
            self.lengths,
            self.tables,
            how.scale,
            how.window,
            how.softcap,
            None if sinks is None else sinks.float(),
        )
        whole = out.new_zeros(self.shape.numel(), *out.shape[1:]).index_copy(0, self.rows, out)
        return whole.view(*self.shape, *out.shape[1:])
