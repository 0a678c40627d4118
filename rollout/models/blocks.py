"""Blocks that the decoder architectures are composed of."""

from __future__ import annotations

from torch import Tensor, nn

from rollout.kernels import silu_mul
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import Attention
from rollout.models.layers.base import Build
from rollout.models.layers.embedding import Embedding
from rollout.models.layers.linear import MergedColumnLinear, RowLinear
from rollout.models.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, hidden] -> [T, hidden]; one all-reduce."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        config = build.config
        hidden, inner = config.hidden_size, config.intermediate_size
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up_proj = MergedColumnLinear(build, hidden, parts, config.mlp_bias)
        self.down_proj = RowLinear(build, inner, hidden, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(silu_mul(self.gate_up_proj(x)))
        return out


class DecoderBlock(nn.Module):
    """Pre-norm attention and MLP; the residual sum travels beside the last block's output."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, build.config.hidden_size)
        self.self_attn = Attention(build)
        self.post_attention_layernorm = RMSNorm(build, build.config.hidden_size)
        self.mlp = GatedMLP(build)

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        kv: LayerKV,
    ) -> tuple[Tensor, Tensor]:
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add(x, residual)
        x = self.self_attn(x, cos, sin, batch, kv)
        x, residual = self.post_attention_layernorm.add(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, blocks and final norm: what a checkpoint calls ``model``."""

    def __init__(self, build: Build, blocks: list[DecoderBlock]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(build)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(build, build.config.hidden_size)
