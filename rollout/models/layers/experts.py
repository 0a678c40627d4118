"""The experts of one layer: this rank's boxes of all of them, in two parameters."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels import fused_experts
from rollout.models.layers.base import Build, Layer
from rollout.weights import Box, WeightSlot


class Experts(Layer):
    """``w13`` [experts here, 2 inner here, hidden] and ``w2`` [experts here, hidden, inner here].

    Which boxes lie here is the only difference between the two ways to split: every rank holds its
    part of each expert's inner rows, or (``expert_parallel``) some experts whole, a run of nearly
    equal length. Experts of other ranks are known (their slots are empty) but not kept.

    [T, hidden] -> this rank's part of the sum, [T, hidden]: the caller reduces.
    """

    w13: Tensor
    w2: Tensor

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        moe, tp = build.config.moe, build.tp
        assert moe is not None, "a layer of experts needs their configuration"
        self.linears, self.total = moe.arch.names.linears, moe.num_experts
        self.hidden, self.inner = build.config.hidden_size, moe.expert_size
        self.first, self.count = 0, self.total
        self.first_inner, self.local = 0, self.inner
        if build.expert_parallel:
            self.first = self.total * tp.rank // tp.size
            self.count = self.total * (tp.rank + 1) // tp.size - self.first
        else:
            self.local = self.inner // tp.size
            self.first_inner = tp.rank * self.local
        self.declare("w13", (self.count, 2 * self.local, self.hidden))
        self.declare("w2", (self.count, self.hidden, self.local))

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return fused_experts(x, self.w13, self.w2, experts, weights, self.first)

    def slots(self, prefix: str) -> list[WeightSlot]:
        gate, up, down = self.linears
        rows = Box((self.first_inner, 0), (self.first_inner + self.local, self.hidden))
        columns = Box((0, self.first_inner), (self.hidden, self.first_inner + self.local))
        outer, inner = (self.inner, self.hidden), (self.hidden, self.inner)
        result = []
        for index in range(self.total):
            at = index - self.first
            here = 0 <= at < self.count
            for name, shape, take, param, row in (
                (gate, outer, rows, "w13", 0),
                (up, outer, rows, "w13", self.local),
                (down, inner, columns, "w2", 0),
            ):
                high, wide = take.shape
                put = Box((at, row, 0), (at + 1, row + high, wide)) if here else _NOTHING_3D
                kept = take if here else _NOTHING_2D
                source = f"{prefix}.{index}.{name}.weight"
                result.append(WeightSlot(source, shape, kept, f"{prefix}.{param}", put))
        return result


_NOTHING_2D, _NOTHING_3D = Box.full((0, 0)), Box.full((0, 0, 0))
