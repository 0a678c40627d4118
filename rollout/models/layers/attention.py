"""Attention of this rank's heads over the paged KV cache."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollout.kernels import (
    batch_invariant_attention,
    norm_rope_and_cache,
    paged_attention,
    rope_and_cache,
)
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build, Layer, rows_slot
from rollout.models.layers.linear import QKVLinear, RowLinear
from rollout.models.layers.norm import HeadsNorm, RMSNorm, RowNorm, UnitNorm, make_norm
from rollout.weights import WeightSlot

CosSin = tuple[Tensor, Tensor]  # cos and sin of the step's positions, each [T, rotated dims]


class Attention(nn.Module):
    """Project, normalise q and k where the model does, rotate, store, attend, project back.

    [T, inputs] -> [T, hidden]; one all-reduce, and another where q and k are normalised over the
    heads of all ranks. Keys are stored rotated. ``inputs``: by default the hidden size.
    """

    def __init__(self, build: Build, index: int, inputs: int | None = None) -> None:
        super().__init__()
        config, size = build.config, build.tp.size
        self.build, self.head_dim = build, config.head_dim
        self.heads = config.num_heads // size
        self.kv_heads = max(1, config.num_kv_heads // size)
        self.scale, self.softcap = config.attention_scale, config.attention_softcap
        self.window = config.layers[index].window
        self.sinks = Sinks(build) if config.arch.sinks else None
        self.rotated = 0  # dims of neighbours that rotate; 0 where pairs are a half apart
        if config.arch.interleaved:
            rope = config.layers[index].rope
            self.rotated = 0 if rope.kind == "none" else int(config.head_dim * rope.partial)
        self.growth = config.layers[index].growth
        self.attend = batch_invariant_attention if build.deterministic else paged_attention
        self.qkv_proj = QKVLinear(build, inputs)
        self.gated = config.arch.gated
        made = config.num_heads * config.head_dim
        self.o_proj = RowLinear(build, made, config.hidden_size, config.o_bias)
        normalised = config.qk_norm
        if config.arch.qk_norm_over == "turned" and config.layers[index].rope.kind == "none":
            normalised = False
        self.q_norm = self._norm(0) if normalised else None
        self.k_norm = self._norm(1) if normalised else None

    def forward(self, x: Tensor, cos_sin: CosSin, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        wide = self.heads * (2 if self.gated else 1)
        q, k, v = heads.split((wide, self.kv_heads, self.kv_heads), dim=1)
        if self.gated:
            q, gate = q.unflatten(1, (self.heads, 2)).unbind(2)
        q = self._rotate(q, k, v, cos_sin, kv, batch.slot_mapping)
        if self.growth is not None:
            periods = (batch.positions + self.growth.ahead) // self.growth.period
            grown = torch.log(1 + periods) * self.growth.beta
            q = q * (1 + grown).to(q.dtype)[:, None, None]
        out = self.attend(
            q,
            kv.k,
            kv.v,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            self.scale,
            self.window,
            self.softcap,
            None if self.sinks is None else self.sinks(),
            kv.k_scales,
            kv.v_scales,
        )  # [T, heads, head_dim]
        if self.gated:
            out = out * torch.sigmoid(gate)
        projected: Tensor = self.o_proj(out.reshape(len(x), -1))
        return projected

    def _rotate(
        self, q: Tensor, k: Tensor, v: Tensor, cos_sin: CosSin, kv: LayerKV, slots: Tensor
    ) -> Tensor:
        """q normalised and turned; k, likewise, and v are in the cache."""
        norm, other, in_parts = self.q_norm, self.k_norm, self.rotated or not q.is_cuda
        pages = *cos_sin, kv.k, kv.v, slots
        scales = kv.k_scales, kv.v_scales
        if isinstance(norm, RMSNorm) and isinstance(other, RMSNorm) and not in_parts:
            # One launch; on a CPU they cost no more apart.
            weights = norm.weight, other.weight, norm.eps, norm.offset
            return norm_rope_and_cache(q, k, v, *weights, *pages, *scales)
        if norm is not None and other is not None:
            q, k = self._normalise(q, k)
        if self.rotated:
            q, k = apart(q, self.rotated), apart(k, self.rotated)
        return rope_and_cache(q, k, v, *pages, *scales)

    def squares(self, x: Tensor, heads: int) -> Tensor:
        """[T, 1]: of all ``heads`` of all ranks, added in an order of their own; x: those here."""
        own = _folded(x.float().pow(2))[..., 0]  # [T, heads here]
        copies = max(1, self.build.tp.size * own.shape[-1] // heads)  # of each KV head
        return _folded(self.build.tp.all_gather(own)[:, ::copies])

    def _norm(self, part: int) -> nn.Module:
        """The norm of queries (part 0) or keys (1)."""
        config, over = self.build.config, self.build.config.arch.qk_norm_over
        if over == "turned":
            return UnitNorm(config.norm_eps)
        if over == "head":
            return make_norm(self.build, config.head_dim)
        _, total, first, count = self.qkv_proj.parts[part]
        if over == "row":
            return RowNorm(self.build, total, first, count)
        total, first, count = (rows // config.head_dim for rows in (total, first, count))
        return HeadsNorm(self.build, total, first, count)

    def _normalise(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        assert self.q_norm is not None
        assert self.k_norm is not None
        if not isinstance(self.q_norm, RowNorm) or not isinstance(self.k_norm, RowNorm):
            return self.q_norm(q), self.k_norm(k)
        rows_q, rows_k, tp = q.flatten(1), k.flatten(1), self.build.tp
        if self.build.deterministic:
            config = self.build.config
            q = self.q_norm.part(rows_q, self.squares(q, config.num_heads)).view_as(q)
            return q, self.k_norm.part(rows_k, self.squares(k, config.num_kv_heads)).view_as(k)
        if tp.size == 1:
            return self.q_norm.whole(rows_q).view_as(q), self.k_norm.whole(rows_k).view_as(k)
        squares = torch.stack([x.float().pow(2).sum(-1) for x in (rows_q, rows_k)], dim=1)
        squares = tp.all_reduce(squares)
        copies = max(1, tp.size // self.build.config.num_kv_heads)  # of each KV head
        q = self.q_norm.part(rows_q, squares[:, :1]).view_as(q)
        return q, self.k_norm.part(rows_k, squares[:, 1:] / copies).view_as(k)


def _folded(x: Tensor) -> Tensor:
    """The sum over the last dimension, [..., 1], neighbours first: the same for any batch."""
    while x.shape[-1] > 1:
        even = x[..., : x.shape[-1] // 2 * 2]
        pairs = even[..., ::2] + even[..., 1::2]
        x = pairs if even.shape == x.shape else torch.cat((pairs, x[..., -1:]), dim=-1)
    return x


class Sinks(Layer):
    """A score of each head of this rank, under the name of this module itself: float32 [heads]."""

    scores: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.heads = build.config.num_heads
        self.declare("scores", (self.heads // build.tp.size,))

    def forward(self) -> Tensor:
        return self.scores.float()

    def slots(self, prefix: str) -> list[WeightSlot]:
        count = len(self.scores)
        first = self.build.tp.rank * count
        return [rows_slot(prefix, (self.heads,), first, count, f"{prefix}.scores", 0)]


def apart(x: Tensor, turned: int) -> Tensor:
    """Heads whose pairs are neighbours in the order in which pairs are a half apart.

    The same for queries and keys leaves their products as they are.
    """
    pairs = x[..., :turned].reshape(*x.shape[:-1], turned // 2, 2)
    pairs = pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((pairs, x[..., turned:]), dim=-1)
