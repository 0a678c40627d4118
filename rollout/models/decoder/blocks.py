"""Blocks that the decoder architectures are composed of."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.functional import relu, silu

from rollout.models.arch import BlockNorms
from rollout.models.decoder.absent import Absent, of_first_stage
from rollout.models.forward import ForwardBatch, LayerKV, RoutedExperts
from rollout.models.layers.attention import Attention, CosSin
from rollout.models.layers.base import Build
from rollout.models.layers.delta_net import GatedDeltaNet
from rollout.models.layers.delta_parts import DeltaNetOfParts
from rollout.models.layers.embedding import Embedding
from rollout.models.layers.latent_attention import LatentAttention
from rollout.models.layers.linear import MergedColumnLinear, RowLinear
from rollout.models.layers.mamba import Mamba2
from rollout.models.layers.norm import Norm, make_norm


class GatedMLP(nn.Module):
    """down(act(gate(x)) * up(x)): [T, hidden] -> [T, hidden]; one all-reduce. The gate and what
    comes out may have factors (silu alone).

    ``inner``: its size, by default the config's. ``reduce=False`` leaves the sum to the caller.
    """

    def __init__(self, build: Build, inner: int | None = None, *, reduce: bool = True) -> None:
        super().__init__()
        config = build.config
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        parts = [("gate_proj", inner), ("up_proj", inner)]
        self.names, self.scales = config.arch.mlp_linears, config.mlp_scales
        fused = config.arch.fused_gate_up
        gate_up = MergedColumnLinear(build, hidden, parts, config.mlp_bias, fused)
        self.add_module(self.names[0], gate_up)
        self.add_module(self.names[1], RowLinear(build, inner, hidden, config.mlp_bias, reduce))

    @property
    def gate_up(self) -> MergedColumnLinear:
        linear: MergedColumnLinear = getattr(self, self.names[0])
        return linear

    @property
    def down(self) -> RowLinear:
        linear: RowLinear = getattr(self, self.names[1])
        return linear

    def forward(self, x: Tensor, experts: RoutedExperts | None = None) -> Tensor:
        """``experts``: of a mixture whose layer this is, too; not used."""
        of_gate, makes = self.scales
        if of_gate == 1:
            inner = self.gate_up.gated(x)
        else:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            inner = silu(gate * of_gate) * up
        out: Tensor = self.down(inner)
        return out if makes == 1 else out * makes


class SquaredMLP(nn.Module):
    """down(relu(up(x)) ** 2): [T, hidden] -> [T, hidden]; one all-reduce, unless ``reduce`` is not
    set. ``inner``: its size, by default the config's.
    """

    def __init__(self, build: Build, inner: int | None = None, *, reduce: bool = True) -> None:
        super().__init__()
        config = build.config
        hidden, inner = config.hidden_size, inner or config.intermediate_size
        bias = config.mlp_bias
        self.up_proj = MergedColumnLinear(build, hidden, [("up_proj", inner)], bias)
        self.down_proj = RowLinear(build, inner, hidden, bias, reduce)

    def forward(self, x: Tensor, experts: RoutedExperts | None = None) -> Tensor:
        """``experts``: as of a ``GatedMLP``."""
        out: Tensor = self.down_proj(relu(self.up_proj(x)).square())
        return out


def make_mlp(build: Build, inner: int | None = None, *, reduce: bool = True) -> nn.Module:
    """The dense feed-forward of an architecture."""
    kind = SquaredMLP if build.config.arch.squared else GatedMLP
    return kind(build, inner, reduce=reduce)


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
        self.names, self.parallel = norms_of(build, index), build.config.arch.parallel
        self.scale = build.config.residual_scale
        self.mixer_name, mixer = make_mixer(build, index)
        self.add_module(self.mixer_name, mixer)
        self.ends = build.config.attention_ends
        if build.config.layers and build.config.layers[index].beside:
            self.mamba = Mamba2(build)
        self.mlp_name = name
        self.add_module(name, feed_forward or make_mlp(build))
        names = self.names
        for norm in (
            names.before_attention, names.after_attention, names.before_mlp, names.after_mlp
        ):  # fmt: skip
            if norm is not None:
                self.add_module(norm, make_norm(build, build.config.hidden_size))

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: CosSin,
        batch: ForwardBatch,
        kv: LayerKV,
        experts: RoutedExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        told = () if experts is None else (experts,)
        names = self.names
        x, residual = _normed(self._norm(names.before_attention), x, residual)
        out = self._mix(x, cos_sin, batch, kv)
        if self.parallel:
            return self._scaled(out + getattr(self, self.mlp_name)(x, *told)), residual
        x = self._scaled(self._after(names.after_attention, out))
        x, residual = _normed(self._norm(names.before_mlp), x, residual)
        out = getattr(self, self.mlp_name)(x, *told)
        return self._scaled(self._after(names.after_mlp, out)), residual

    def _mix(self, x: Tensor, cos_sin: CosSin, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        mixer = getattr(self, self.mixer_name)
        if kv.beside is None:
            mixed: Tensor = mixer(x, cos_sin, batch, kv)
            return mixed
        reads, makes = self.ends
        attended: Tensor = mixer(x * reads, cos_sin, batch, kv) * makes
        states: Tensor = self.mamba(x, cos_sin, batch, kv.beside)
        return states + attended

    def _norm(self, name: str | None) -> Norm | None:
        return None if name is None else getattr(self, name)

    def _after(self, name: str | None, x: Tensor) -> Tensor:
        norm = self._norm(name)
        return x if norm is None else norm(x)

    def _scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else x * self.scale


def _normed(norm: Norm | None, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the next half of a block reads, and the residual sum with x."""
    if residual is None:
        return x if norm is None else norm(x), x
    if norm is not None:
        return norm.add(x, residual)
    total = x + residual
    return total, total


def norms_of(build: Build, index: int) -> BlockNorms:
    """What a block has, by what mixes tokens in it."""
    arch = build.config.arch
    states = index in build.config.recurrent_layers
    return arch.norms_beside if states and arch.norms_beside is not None else arch.norms


def make_mixer(build: Build, index: int) -> tuple[str, nn.Module]:
    """What mixes tokens in layer ``index``, and what most files call it."""
    config = build.config
    if index in config.recurrent_layers and not config.layers[index].beside:
        delta = config.arch.delta
        if delta is None:
            return "mamba", Mamba2(build)
        return delta.name, (DeltaNetOfParts if delta.apart else GatedDeltaNet)(build)
    latent = config.latent is not None
    return "self_attn", LatentAttention(build, index) if latent else Attention(build, index)


class LoneBlock(nn.Module):
    """One ``mixer`` behind one ``norm``: what mixes tokens, or a feed-forward; see ``Arch.lone``.

    As of a ``DecoderBlock``, the residual sum travels beside the output. ``feed_forward``: None
    for attention or what stands in its place.
    """

    def __init__(self, build: Build, index: int, feed_forward: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = make_norm(build, build.config.hidden_size)
        self.mixes = feed_forward is None
        self.mixer = make_mixer(build, index)[1] if feed_forward is None else feed_forward

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        cos_sin: CosSin,
        batch: ForwardBatch,
        kv: LayerKV,
        experts: RoutedExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        told = () if experts is None else (experts,)
        x, residual = _normed(self.norm, x, residual)
        return self.mixer(x, cos_sin, batch, kv) if self.mixes else self.mixer(x, *told), residual


class Decoder(nn.Module):
    """Embedding, blocks and final norm: what a checkpoint calls ``model``.

    ``held``: the blocks that are here, of a stage of a pipeline.
    """

    def __init__(self, build: Build, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.names = build.config.arch.embedding, build.config.arch.last_norm
        self.add_module(self.names[0], of_first_stage(build, Embedding))
        self.layers = nn.ModuleList(blocks)
        norm = of_first_stage(build, lambda each: make_norm(each, build.config.hidden_size))
        self.add_module(self.names[1], norm)
        self.held = [block for block in blocks if not isinstance(block, Absent)]

    @property
    def embedding(self) -> Embedding:
        module: Embedding = getattr(self, self.names[0])
        return module

    @property
    def last_norm(self) -> Norm:
        module: Norm = getattr(self, self.names[1])
        return module

    def forward(
        self,
        x: Tensor,
        cos_sins: Sequence[CosSin],
        batches: Sequence[ForwardBatch],
        kv: Sequence[LayerKV],
        residual: Tensor | None = None,
        experts: RoutedExperts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The blocks on embeddings [T, hidden], or on what the stage before made of them: the last
        one's output and the ``residual`` sum.

        ``cos_sins``, ``batches``, ``kv``: each layer's. ``experts``: as ``RoutedExperts.of`` has
        them.
        """
        first = batches[0]
        kept, visual = first.hidden_pages, first.visual
        told = () if experts is None else (experts,)
        levels = [] if visual is None else list(visual.features[:, 1:].unbind(1))
        each = zip(self.held, cos_sins, batches, kv, strict=True)
        for index, (block, cos_sin, batch, pages) in enumerate(each):
            if kept is not None:
                kept.keep_before(index, first, x, residual)
            x, residual = block(x, residual, cos_sin, batch, pages, *told)
            if levels and visual is not None:
                x = x.index_add(0, visual.rows, levels.pop(0))
        assert residual is not None
        if kept is not None:
            kept.keep_before(len(self.held), first, x, residual)
        return x, residual
