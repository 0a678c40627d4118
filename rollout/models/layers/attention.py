"""Attention of this rank's heads over the paged KV cache."""

from __future__ import annotations

from torch import Tensor, nn

from rollout.kernels import batch_invariant_attention, paged_attention, rope_and_cache
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.layers.linear import QKVLinear, RowLinear
from rollout.models.layers.norm import RMSNorm


class Attention(nn.Module):
    """Project, normalise q and k where the model does, rotate, store, attend, project back.

    [T, hidden] -> [T, hidden]; one all-reduce. Keys are stored rotated.
    """

    def __init__(self, build: Build) -> None:
        super().__init__()
        config, size = build.config, build.tp.size
        self.head_dim = config.head_dim
        self.heads = config.num_heads // size
        self.kv_heads = max(1, config.num_kv_heads // size)
        self.scale = config.head_dim**-0.5
        self.window, self.softcap = 0, 0.0
        self.sinks: Tensor | None = None
        self.attend = batch_invariant_attention if build.deterministic else paged_attention
        self.qkv_proj = QKVLinear(build)
        inputs = config.num_heads * config.head_dim
        self.o_proj = RowLinear(build, inputs, config.hidden_size, config.o_bias)
        self.q_norm = RMSNorm(build, config.head_dim) if config.qk_norm else None
        self.k_norm = RMSNorm(build, config.head_dim) if config.qk_norm else None

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, kv: LayerKV
    ) -> Tensor:
        heads = self.qkv_proj(x).view(len(x), -1, self.head_dim)
        q, k, v = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rope_and_cache(q, k, v, cos, sin, kv.k, kv.v, batch.slot_mapping)
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
            self.sinks,
        )  # [T, heads, head_dim]
        projected: Tensor = self.o_proj(out.reshape(len(x), -1))
        return projected
