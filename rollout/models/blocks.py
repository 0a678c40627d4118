"""Blocks that the decoder architectures are composed of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.attention import Attention, Turn
from rollout.models.layers.base import Build
from rollout.models.layers.delta_net import GatedDeltaNet
from rollout.models.layers.embedding import Embedding
from rollout.models.layers.latent_attention import LatentAttention
from rollout.models.layers.linear import MergedColumnLinear, RowLinear
from rollout.models.layers.norm import Norm, make_norm


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [T, hidden] -> [T, hidden]; one all-reduce.

    ``inner``: its size, by default the config's. ``reduce=False`` leaves the sum to the caller.
    """

    def __init__(self, build: Build, inner: int | None = None, *, reduce: bool = True) -> None:
        super().__init__()
        config = build.config
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up_proj = MergedColumnLinear(
            build, hidden, parts, config.mlp_bias, config.arch.fused_gate_up
        )
        self.down_proj = RowLinear(build, inner, hidden, config.mlp_bias, reduce)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.gate_up_proj.gated(x))
        return out


class DecoderBlock(nn.Module):
    """Attention, or what mixes tokens in its place, and feed-forward, with norms before or after
    each as ``BlockNorms`` has them.

    The residual sum travels beside the last block's output. ``feed_forward`` (default: a
    ``GatedMLP``) is the submodule ``name``, as the checkpoint has it.
    """

    def __init__(
        self,
        build: Build,
        index: int,
        feed_forward: nn.Module | None = None,
        name: str = "mlp",
    ) -> None:
        super().__init__()
        self.names, self.parallel = build.config.arch.norms, build.config.arch.parallel
        self.scale = build.config.residual_scale
        recurrent = index in build.config.recurrent_layers
        self.mixer_name = "linear_attn" if recurrent else "self_attn"
        self.add_module(self.mixer_name, _mixer(build, index))
        self.mlp_name = name
        self.add_module(name, feed_forward or GatedMLP(build))
        names = self.names
        for norm in (
            names.before_attention, names.after_attention, names.before_mlp, names.after_mlp
        ):  # fmt: skip
            if norm is not None:
                self.add_module(norm, make_norm(build, build.config.hidden_size))

    def forward(
        self, x: Tensor, residual: Tensor | None, turn: Turn, batch: ForwardBatch, kv: LayerKV
    ) -> tuple[Tensor, Tensor]:
        names = self.names
        x, residual = self._before(names.before_attention, x, residual)
        out = getattr(self, self.mixer_name)(x, turn, batch, kv)
        if self.parallel:
            return self._scaled(out + getattr(self, self.mlp_name)(x)), residual
        x = self._scaled(self._after(names.after_attention, out))
        x, residual = self._before(names.before_mlp, x, residual)
        out = getattr(self, self.mlp_name)(x)
        return self._scaled(self._after(names.after_mlp, out)), residual

    def _before(
        self, name: str | None, x: Tensor, residual: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """What a half reads, and the residual sum with x."""
        norm: Norm | None = None if name is None else getattr(self, name)
        if residual is None:
            return x if norm is None else norm(x), x
        if norm is not None:
            return norm.add(x, residual)
        total = x + residual
        return total, total

    def _after(self, name: str | None, x: Tensor) -> Tensor:
        out: Tensor = x if name is None else getattr(self, name)(x)
        return out

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else x * self.scale


def _mixer(build: Build, index: int) -> nn.Module:
    config = build.config
    if index in config.recurrent_layers:
        return GatedDeltaNet(build)
    return LatentAttention(build) if config.latent is not None else Attention(build, index)


class Decoder(nn.Module):
    """Embedding, blocks and final norm: what a checkpoint calls ``model``."""

    def __init__(self, build: Build, blocks: list[DecoderBlock]) -> None:
        super().__init__()
        self.embed_tokens = Embedding(build)
        self.layers = nn.ModuleList(blocks)
        self.norm = make_norm(build, build.config.hidden_size)

    def forward(
        self,
        x: Tensor,
        turns: Sequence[Turn],
        batches: Sequence[ForwardBatch],
        kv: Sequence[LayerKV],
    ) -> tuple[Tensor, Tensor]:
        """The blocks on embeddings [T, hidden]: the last one's output and the residual sum.

        ``turns``, ``batches``, ``kv``: each layer's.
        """
        residual: Tensor | None = None
        visual = batches[0].visual
        levels = [] if visual is None else list(visual.features[:, 1:].unbind(1))
        for block, turn, batch, pages in zip(self.layers, turns, batches, kv, strict=True):
            x, residual = block(x, residual, turn, batch, pages)
            if levels and visual is not None:
                x = x.index_add(0, visual.rows, levels.pop(0))
        assert residual is not None
        return x, residual
