"""Latent attention: one small vector of a token is cached in the place of its keys and values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rollout.kernels import paged_attention, rope_and_cache
from rollout.models.config.latent import LatentConfig
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import CosSin
from rollout.models.layers.base import Build, Layer, rows_slot
from rollout.models.layers.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from rollout.models.layers.norm import RMSNorm
from rollout.models.layers.token_index import TokenIndex
from rollout.weights import WeightSlot

EPS = 1e-6  # of the two norms here, whatever the config says of the others


class LatentAttention(nn.Module):
    """Scores and sums in the space of the cached vectors; [T, hidden] -> [T, hidden].

    A key head is ``[up_k latent, turned]`` and a value head ``up_v latent``. So a score is that of
    ``[turned q, q up_k]`` with the cached ``[turned, latent]``, and the weighted sum of values is
    ``up_v`` of the weighted sum of latents: all heads attend to one, and nothing is expanded. The
    products with ``up`` are views of the file's own ``kv_b_proj``: nothing is derived from it that
    an update could leave behind. Heads are split over ranks, the cached vectors replicated; one
    all-reduce. (DeepSeek-V2, arXiv 2405.04434, section 2.1.)

    Where there is an index, a token attends to those that it chooses: in this layer, or in the
    last one before it that has one.
    """

    def __init__(self, build: Build, layer: int) -> None:
        super().__init__()
        config = build.config
        latent = config.latent
        assert latent is not None, "latent attention needs its sizes"
        self.latent, hidden = latent, config.hidden_size
        self.heads = config.num_heads // build.tp.size
        outputs, inputs = config.num_heads * (latent.nope_dim + latent.rope_dim), hidden
        self.q_a_proj: ReplicatedLinear | None = None
        if latent.q_rank is not None:
            inputs = latent.q_rank
            self.q_a_proj = ReplicatedLinear(build, hidden, inputs, config.qkv_bias, tiled=True)
            self.q_a_layernorm = RMSNorm(build, inputs, EPS)
        self.q = "q_proj" if latent.q_rank is None else "q_b_proj"
        self.add_module(self.q, MergedColumnLinear(build, inputs, [(self.q, outputs)], bias=False))
        self.kv_a_proj_with_mqa = ReplicatedLinear(
            build, hidden, latent.rank + latent.rope_dim, config.qkv_bias, tiled=True
        )
        self.kv_a_layernorm = RMSNorm(build, latent.rank, EPS)
        self.kv_b_proj = LatentUp(build, latent)
        values = config.num_heads * latent.value_dim
        self.o_proj = RowLinear(build, values, hidden, config.o_bias)
        self.indexer: TokenIndex | None = None
        if latent.index is not None and layer in latent.index.layers:
            self.indexer = TokenIndex(build, latent.index, inputs)

    def forward(self, x: Tensor, cos_sin: CosSin, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        latent = self.latent
        vector = x if self.q_a_proj is None else self.q_a_layernorm(self.q_a_proj(x))
        q, key = self.query(vector), self.key(x)
        cache, scales, slots = kv.k, kv.k_scales, batch.slot_mapping
        q = rope_and_cache(q, key, None, *cos_sin, cache, None, slots, scales)
        if self.indexer is not None:
            assert kv.index is not None, "an index has pages of its own"
            self.indexer(x, vector, cos_sin, batch, kv.index)
        chosen = batch.chosen
        if chosen is None or chosen.slots is None or chosen.counts is None:
            places = batch.query_starts, batch.context_lens, batch.block_tables
        else:  # each token is a sequence, whose blocks are of one token
            rows = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
            places = rows, chosen.counts, chosen.slots
            cache = cache.view(-1, 1, 1, latent.cached)
            scales = None if scales is None else scales.view(-1, 1, 1)
        out = paged_attention(
            q, cache, cache, *places, latent.scale, k_scales=scales, v_scales=scales
        )  # [T, heads, cached]
        values = self.kv_b_proj.values(out[..., latent.rope_dim :])
        projected: Tensor = self.o_proj(values.flatten(1))
        return projected

    def query(self, vector: Tensor) -> Tensor:
        """[T, heads, cached], not turned yet."""
        q = getattr(self, self.q)(vector).view(len(vector), self.heads, -1)
        nope, rope = q.split((self.latent.nope_dim, self.latent.rope_dim), dim=-1)
        return torch.cat((self.halves(rope), self.kv_b_proj.absorbed(nope)), dim=-1)

    def key(self, x: Tensor) -> Tensor:
        """[T, 1, cached], not turned yet."""
        vector, rope = self.kv_a_proj_with_mqa(x).split(
            (self.latent.rank, self.latent.rope_dim), dim=-1
        )
        return torch.cat((self.halves(rope), self.kv_a_layernorm(vector)), dim=-1)[:, None]

    def halves(self, x: Tensor) -> Tensor:
        """Pairs of neighbours to pairs that are half of the width apart, as they are turned."""
        if not self.latent.interleaved:
            return x
        return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


class LatentUp(Layer):
    """``kv_b_proj``: of each head of this rank the rows of its keys, then those of its values.

    Plain in any layout of the other linears: both products read it where it lies.
    """

    weight: Tensor

    def __init__(self, build: Build, latent: LatentConfig) -> None:
        super().__init__(build)
        self.latent, self.heads = latent, build.config.num_heads
        self.each = latent.nope_dim + latent.value_dim
        self.local = self.heads // build.tp.size
        self.declare("weight", (self.local * self.each, latent.rank))

    def absorbed(self, nope: Tensor) -> Tensor:
        """Queries [T, heads, nope_dim] in the space of latents: [T, heads, rank]."""
        up = self.weight.view(self.local, self.each, -1)[:, : self.latent.nope_dim]
        return torch.bmm(nope.transpose(0, 1), up).transpose(0, 1)

    def values(self, sums: Tensor) -> Tensor:
        """Sums of latents [T, heads, rank] as sums of values [T, heads, value_dim]."""
        up = self.weight.view(self.local, self.each, -1)[:, self.latent.nope_dim :]
        return torch.bmm(sums.transpose(0, 1), up.transpose(1, 2)).transpose(0, 1)

    def slots(self, prefix: str) -> list[WeightSlot]:
        name, rows = f"{prefix}.weight", self.local * self.each
        shape = (self.heads * self.each, self.latent.rank)
        return [rows_slot(name, shape, self.build.tp.rank * rows, rows, name, 0)]
