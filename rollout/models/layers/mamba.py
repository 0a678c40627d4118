"""Mamba-2: token mixing by a state of fixed size that decays (Dao and Gu 2024)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from rollout.kernels import causal_conv, ssd_scan
from rollout.models.config.mamba import MambaConfig
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build, Layer, rows_slot
from rollout.models.layers.conv_weight import ConvWeight
from rollout.models.layers.linear import MergedColumnLinear, RowLinear
from rollout.weights import WeightSlot

PARTS = ("z", "x", "b", "c", "dt")  # of the projection: gate, what is convolved, steps


class Mamba2(Layer):
    """Project, convolve, let the states of this rank's heads run, gate, normalise, project back.

    [T, hidden] -> [T, hidden]; one all-reduce, and another of the norm's squares where there are
    more ranks than groups. ``A_log``, ``D``, ``dt_bias``: float32 [heads of this rank].
    """

    A_log: Tensor
    D: Tensor
    dt_bias: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        mamba, rank, size = build.config.mamba, build.tp.rank, build.tp.size
        assert mamba is not None
        self.mamba, self.heads = mamba, mamba.heads // size
        self.widths = [mamba.share(part, rank, size)[2] for part in PARTS]
        inner = mamba.heads * mamba.dim
        self.in_proj = _Projection(build)
        channels = [mamba.share(part, rank, size) for part in "xbc"]
        self.conv1d = ConvWeight(build, channels, mamba.width, mamba.conv_bias)
        for name in ("A_log", "D", "dt_bias"):
            self.declare(name, (self.heads,))
        self.norm = GroupNorm(build, mamba) if mamba.normed else None
        self.out_proj = RowLinear(build, inner, build.config.hidden_size, mamba.out_bias)
        self.scales: Tensor | None = None  # of each output of the first projection
        if set(mamba.parts) != {1.0}:
            parts = zip(mamba.parts, self.widths, strict=True)
            whole = [torch.full((width,), scale) for scale, width in parts]
            self.scales = torch.cat(whole).to(build.device)

    def forward(self, x: Tensor, _cos_sin: object, batch: ForwardBatch, kv: LayerKV) -> Tensor:
        """``kv``: the states of this layer, of which those of ``batch.state_slots`` go on."""
        assert batch.state_slots is not None, "recurrent layers need slots for their states"
        where = batch.state_slots, batch.query_starts, batch.context_lens
        gate, *mixed, dt = self.widths
        reads, makes = self.mamba.ends
        projected: Tensor = self.in_proj(x if reads == 1 else x * reads)
        if self.scales is not None:
            projected = projected * self.scales.to(x.dtype)
        z, channels, steps = torch.split(projected, [gate, sum(mixed), dt], dim=1)
        conv = self.conv1d
        channels = causal_conv(channels, conv.weight[:, 0], kv.k, *where, conv.bias)
        values, b, c = torch.split(channels, mixed, dim=1)
        steps = softplus(steps.float() + self.dt_bias).clamp(*self.mamba.steps)
        out = ssd_scan(
            values.view(len(x), self.heads, self.mamba.dim),
            b.view(len(x), -1, self.mamba.state),
            c.view(len(x), -1, self.mamba.state),
            steps,
            -self.A_log.exp(),
            self.D,
            kv.v,
            *where,
        )  # [T, heads, dim]
        out = out.flatten(1)
        out = (
            (out.float() * silu(z.float())).to(x.dtype) if self.norm is None else self.norm(out, z)
        )
        back: Tensor = self.out_proj(out)
        return back if makes == 1 else back * makes

    def slots(self, prefix: str) -> list[WeightSlot]:
        first, total = self.build.tp.rank * self.heads, (self.mamba.heads,)
        names = [f"{prefix}.{name}" for name in self.specs]
        return [rows_slot(name, total, first, self.heads, name, 0) for name in names]


class _Projection(MergedColumnLinear):
    """``in_proj``: the gate, what is convolved, and the steps, of this rank's heads and groups."""

    def __init__(self, build: Build) -> None:
        mamba = build.config.mamba
        assert mamba is not None
        parts = [(name, mamba.share(name, 0, 1)[0]) for name in PARTS]
        super().__init__(build, build.config.hidden_size, parts, mamba.bias, fused=True)

    def share(self, index: int, rows: int) -> tuple[int, int]:
        mamba, tp = self.build.config.mamba, self.build.tp
        assert mamba is not None
        _, first, count = mamba.share(PARTS[index], tp.rank, tp.size)
        return first, count


class GroupNorm(Layer):
    """x * silu(gate), by the root of the mean square of each group of all ranks, times a weight;
    or, where the norm is first, x alone by that, and then gated.

    [T, channels of this rank]; collective where a group lies on several ranks.
    """

    weight: Tensor

    def __init__(self, build: Build, mamba: MambaConfig) -> None:
        super().__init__(build)
        self.eps, self.tp = build.config.norm_eps, build.tp
        self.total, self.first, self.count = mamba.share("x", build.tp.rank, build.tp.size)
        self.groups, self.size = mamba.groups, self.total // mamba.groups
        self.norm_first = mamba.norm_first
        self.declare("weight", (self.count,))

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        gated = x.float() if self.norm_first else x.float() * silu(gate.float())
        wide = gated.view(len(x), -1, min(self.size, self.count))
        squares = wide.pow(2).sum(-1, keepdim=True)  # [T, groups here, 1]
        if self.size > self.count:
            own = self.first // self.size
            whole = squares.new_zeros((len(x), self.groups))
            whole[:, own] = squares[:, 0, 0]
            squares = self.tp.all_reduce(whole)[:, own, None, None]
        normed: Tensor = wide * torch.rsqrt(squares / self.size + self.eps)
        weighted = self.weight.float() * normed.flatten(1)
        return (weighted * silu(gate.float()) if self.norm_first else weighted).to(x.dtype)

    def slots(self, prefix: str) -> list[WeightSlot]:
        name = f"{prefix}.weight"
        return [rows_slot(name, (self.total,), self.first, self.count, name, 0)]
