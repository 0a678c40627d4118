"""Blocks that the decoder architectures are composed of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import Attention
from rollout.models.layers.base import Build
from rollout.models.layers.embedding import Embedding
from rollout.models.layers.latent_attention import LatentAttention
from rollout.models.layers.linear import MergedColumnLinear, RowLinear
from rollout.models.layers.norm import RMSNorm


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)): [T, hidden] -> [T, hidden]; one all-reduce.

    ``inner``: its size, by default the config's. ``reduce=False`` leaves the sum to the caller.
    """

    def __init__(self, build: Build, inner: int | None = None, *, reduce: bool = True) -> None:
        super().__init__()
        config = build.config
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up_proj = MergedColumnLinear(build, hidden, parts, config.mlp_bias)
        self.down_proj = RowLinear(build, inner, hidden, config.mlp_bias, reduce)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj.gated(x))
        return out


class DecoderBlock(nn.Module):
    """Pre-norm attention and feed-forward; the residual sum travels beside the last block's output.

    ``feed_forward`` (default: a ``GatedMLP``) is the submodule ``name``, as the checkpoint has it.
    """

    def __init__(
        self, build: Build, feed_forward: nn.Module | None = None, name: str = "mlp"
    ) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(build, build.config.hidden_size)
        latent = build.config.latent is not None
        self.self_attn = LatentAttention(build) if latent else Attention(build)
        self.post_attention_layernorm = RMSNorm(build, build.config.hidden_size)
        self.feed_forward = name
        self.add_module(name, feed_forward or GatedMLP(build))

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
        out: Tensor = getattr(self, self.feed_forward)(x)
        return out, residual


class Decoder(nn.Module):
    """Embedding, blocks and final norm: what a checkpoint calls ``model``."""

    def __init__(self, build: Build, blocks: list[DecoderBlock]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(build)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(build, build.config.hidden_size)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, batch: ForwardBatch, kv: Sequence[LayerKV]
    ) -> tuple[Tensor, Tensor]:
        """The blocks on embeddings [T, hidden]: the last one's output and the residual sum."""
        residual: Tensor | None = None
        for block, pages in zip(self.layers, kv, strict=True):
            x, residual = block(x, residual, cos, sin, batch, pages)
        assert residual is not None
        return x, residual
