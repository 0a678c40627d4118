"""Gated delta nets: token mixing by a state of fixed size (Yang et al. 2024)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from rollout.kernels import causal_conv, gated_delta_rule, rms_norm
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build, Layer, rows_slot, whole_slot
from rollout.models.layers.conv_weight import ConvWeight
from rollout.models.layers.linear import MergedColumnLinear, RowLinear
from rollout.weights import WeightSlot


class GatedDeltaNet(Layer):
    """Project, convolve, let the delta rule run over this rank's heads, normalise, project back.

    [T, hidden] -> [T, hidden]; one all-reduce. Each rank has whole key heads with their values.
    ``A_log`` and ``dt_bias``: float32 [heads of this rank], how fast their states decay.
    """

    A_log: Tensor
    dt_bias: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        config, delta = build.config, build.config.delta
        assert delta is not None
        assert config.arch.delta is not None
        self.delta, self.fused = delta, config.arch.delta.fused
        self.heads = delta.heads // build.tp.size
        self.key_heads = delta.key_heads // build.tp.size
        values, heads = delta.heads * delta.dim, delta.heads
        if self.fused:
            self.in_proj_qkvz = _columns(build, ("in_proj_qkvz", sum(delta.parts) + values))
            self.in_proj_ba = _columns(build, ("in_proj_ba", 2 * heads))
        else:
            named = list(zip("qkv", delta.parts, strict=True))
            self.in_proj_qkv = MergedColumnLinear(build, config.hidden_size, named, False, True)
            gates = (("in_proj_b", heads), ("in_proj_a", heads))
            self.in_proj_zba = _columns(build, ("in_proj_z", values), *gates)
        rank, size = build.tp.rank, build.tp.size
        channels = [(part, rank * part // size, part // size) for part in delta.parts]
        self.conv1d = ConvWeight(build, channels, delta.width)
        for name in ("A_log", "dt_bias"):
            self.declare(name, (self.heads,))
        self.norm = GatedNorm(build, delta.dim)
        self.out_proj = RowLinear(build, values, config.hidden_size, False)

    def forward(self, x: Tensor, _cos_sin: object, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """``kv``: the states of this layer, of which those of ``batch.state_slots`` go on."""
        assert batch.state_slots is not None, "recurrent layers need slots for their states"
        where = batch.state_slots, batch.query_starts, batch.context_lens
        mixed, z, b, a = self.project(x)
        mixed = causal_conv(mixed, self.conv1d.weight[:, 0], kv.k, *where)
        keys, key_dim = self.key_heads * self.delta.key_dim, self.delta.key_dim
        q, k, v = torch.split(mixed, [keys, keys, self.heads * self.delta.dim], dim=1)
        out = gated_delta_rule(
            q.view(len(x), self.key_heads, key_dim),
            k.view(len(x), self.key_heads, key_dim),
            v.view(len(x), self.heads, self.delta.dim),
            -self.A_log.exp() * softplus(a.float() + self.dt_bias),
            b.sigmoid().float(),
            kv.v,
            *where,
        )  # [T, heads, dim]
        projected: Tensor = self.out_proj(self.norm(out, z).flatten(1))
        return projected

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side [T, channels]; z [T, heads, dim]; b and a [T, heads]."""
        values, dim = self.heads * self.delta.dim, self.delta.dim
        if not self.fused:
            z, b, a = self.in_proj_zba(x).split((values, self.heads, self.heads), dim=1)
            return self.in_proj_qkv(x), z.unflatten(1, (self.heads, dim)), b, a
        each = self.heads // self.key_heads
        widths = (self.delta.key_dim, self.delta.key_dim, each * dim, each * dim)
        by_head = self.in_proj_qkvz(x).unflatten(1, (self.key_heads, -1)).split(widths, dim=2)
        q, k, v, z = (part.flatten(1) for part in by_head)
        b, a = self.in_proj_ba(x).unflatten(1, (self.key_heads, 2, each)).unbind(2)
        mixed = torch.cat((q, k, v), dim=1)
        return mixed, z.unflatten(1, (self.heads, dim)), b.flatten(1), a.flatten(1)

    def slots(self, prefix: str) -> list[WeightSlot]:
        first, total = self.build.tp.rank * self.heads, (self.delta.heads,)
        names = [f"{prefix}.{name}" for name in self.specs]
        return [rows_slot(name, total, first, self.heads, name, 0) for name in names]


class GatedNorm(Layer):
    """A root-mean-square norm of each head, times the silu of its gate; replicated."""

    weight: Tensor

    def __init__(self, build: Build, size: int) -> None:
        super().__init__(build)
        self.eps = build.config.norm_eps
        self.declare("weight", (size,))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = rms_norm(x, self.weight, self.eps).float()
        return (normed * torch.nn.functional.silu(gate.float())).to(x.dtype)

    def slots(self, prefix: str) -> list[WeightSlot]:
        name = f"{prefix}.weight"
        return [whole_slot(name, self.specs["weight"].shape, name)]


def _columns(build: Build, *parts: tuple[str, int]) -> MergedColumnLinear:
    return MergedColumnLinear(build, build.config.hidden_size, list(parts), False)
