"""The experts of one layer: this rank's boxes of all of them, in two parameters."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from rollout.kernels import fused_experts, quantized_experts
from rollout.kernels.fused_experts import ExpertsLora
from rollout.models.layers.base import Build, Layer, sibling, storage_of
from rollout.models.layers.ordered_experts import ordered_experts
from rollout.models.weight_io.table import SCALE
from rollout.weights import PLAIN, Box, WeightSlot
from rollout.weights.quantization import Scheme


class ExpertAdapters(Protocol):
    """What may lie beside the experts of a layer; see ``adapters.experts.BesideExperts``."""

    def of_step(self, tokens: int) -> ExpertsLora | None:
        """None where no token of this step has an adapter."""
        ...


class _Placed(Layer):
    """Which boxes lie here is the only difference between the two ways to split.

    Every rank holds its part of each expert's inner rows, or (``expert_parallel``) some experts
    whole, a run of nearly equal length. Experts of other ranks are known (their slots are empty)
    but not kept.
    """

    w13: Tensor
    w2: Tensor
    expert_adapters: ExpertAdapters | None = None

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        moe, tp = build.config.moe, build.tp
        assert moe is not None, "a layer of experts needs their configuration"
        self.moe, self.total = moe, moe.num_experts
        self.hidden, self.inner = moe.narrow or build.config.hidden_size, moe.expert_size
        self.first, self.count = 0, self.total
        self.first_inner, self.local = 0, self.inner
        if build.expert_parallel:
            self.first = self.total * tp.rank // tp.size
            self.count = self.total * (tp.rank + 1) // tp.size - self.first
        else:
            self.local = self.inner // tp.size
            self.first_inner = tp.rank * self.local

    @property
    def kept(self) -> tuple[int, int]:
        """The first expert here, and the one behind the last."""
        return self.first, self.first + self.count


class _Stacked(_Placed):
    """What files have in two tensors, and their biases: ``b2`` is added by the first rank, or by
    the rank that has the expert."""

    b13: Tensor | None
    b2: Tensor | None

    def declare_biases(self) -> None:
        assert self.moe.arch.stacked is not None
        self.stacked = self.moe.arch.stacked
        for name, width in (("b13", 2 * self.local), ("b2", self.hidden)):
            self.register_parameter(name, None)
            if self.stacked.bias:
                self.declare(name, (self.count, width))

    @property
    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        alone = self.build.expert_parallel or self.build.tp.rank == 0
        return self.b13, self.b2 if alone else None

    @property
    def halves(self) -> list[tuple[int, int, int]]:
        """Where gate and up lie: the first of the file's, the first here, how many."""
        here, local = self.first_inner, self.local
        if self.stacked.interleaved:
            return [(2 * here, 0, 2 * local)]
        return [(here, 0, local), (self.inner + here, local, local)]

    def bias_slots(self, prefix: str) -> list[WeightSlot]:
        if not self.stacked.bias:
            return []
        (start, stop), width, found = self.kept, 2 * self.inner, []
        for at, to, many in self.halves:
            take, put = Box((start, at), (stop, at + many)), Box((0, to), (self.count, to + many))
            name = f"{prefix}.gate_up_proj_bias"
            found.append(WeightSlot(name, (self.total, width), take, f"{prefix}.b13", put))
        take, put = Box((start, 0), (stop, self.hidden)), Box.full((self.count, self.hidden))
        shape = (self.total, self.hidden)
        return [*found, WeightSlot(f"{prefix}.down_proj_bias", shape, take, f"{prefix}.b2", put)]


class Experts(_Placed):
    """``w13`` [experts here, 2 inner here, hidden] (inner, of squared ones, which have no gate) and
    ``w2`` [experts here, hidden, inner here].

    [T, hidden] -> this rank's part of the sum, [T, hidden]: the caller reduces.
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.scheme, self.squared = build.quantization, build.config.arch.squared
        halves = 1 if self.squared else 2
        shapes = {"w13": (halves * self.local, self.hidden), "w2": (self.hidden, self.local)}
        for name, shape in shapes.items():
            if self.scheme is None:
                self.declare(name, (self.count, *shape))
            else:
                self.declare_quantized(name, (self.count, *shape), PLAIN, self.scheme)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Deterministic: this rank's lanes, see ``ordered_experts``."""
        beside = self.expert_adapters
        lora = None if beside is None else beside.of_step(len(x))
        if self.build.deterministic:
            place = (self.build, x, self.w13, self.w2, experts, weights, self.first)
            return ordered_experts(*place, (None, None), lora)
        if self.scheme is not None:
            return self._quantized(x, experts, weights, self.scheme, lora=lora)
        first, squared = self.first, self.squared
        return fused_experts(
            x, self.w13, self.w2, experts, weights, first, squared=squared, lora=lora
        )

    def _quantized(
        self,
        x: Tensor,
        experts: Tensor,
        weights: Tensor,
        scheme: Scheme,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
        lora: ExpertsLora | None = None,
    ) -> Tensor:
        w13, s13, w2, s2 = (
            storage_of(self, name) for name in ("w13", f"w13{SCALE}", "w2", f"w2{SCALE}")
        )
        (b13, b2), first, squared = biases, self.first, self.squared
        return quantized_experts(
            *(x, w13, s13, w2, s2, experts, weights),
            scheme,
            first,
            b13,
            b2,
            self.moe.clamped,
            squared,
            lora,
        )

    def slots(self, prefix: str) -> list[WeightSlot]:
        gate, up, down = self.moe.arch.names.linears
        rows = Box((self.first_inner, 0), (self.first_inner + self.local, self.hidden))
        columns = Box((0, self.first_inner), (self.hidden, self.first_inner + self.local))
        outer, inner = (self.inner, self.hidden), (self.hidden, self.inner)
        result = []
        for index in range(self.total):
            at = index - self.first
            here = 0 <= at < self.count
            for name, shape, take, param, row in (
                *(() if self.squared else ((gate, outer, rows, "w13", 0),)),
                (up, outer, rows, "w13", 0 if self.squared else self.local),
                (down, inner, columns, "w2", 0),
            ):
                high, wide = take.shape
                put = Box((at, row, 0), (at + 1, row + high, wide)) if here else _NOTHING_3D
                kept = take if here else _NOTHING_2D
                source = f"{prefix}.{index}.{name}.weight"
                result.append(WeightSlot(source, shape, kept, f"{prefix}.{param}", put))
        return result


class StackedExperts(_Stacked):
    """The same of a checkpoint that stacks them: ``w13`` [experts here, hidden, 2 inner here] and
    ``w2`` [experts here, inner here, hidden], as ``StackedArch`` has them.

    Parameters lie as the file's tensors do, so a fused tensor is one slot (two, where gate and up
    are halves).
    """

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.declare("w13", (self.count, self.hidden, 2 * self.local))
        self.declare("w2", (self.count, self.local, self.hidden))
        self.declare_biases()

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        w13, w2 = self.w13.transpose(1, 2), self.w2.transpose(1, 2)
        if self.build.deterministic:
            return ordered_experts(
                self.build, x, w13, w2, experts, weights, self.first, self.biases
            )
        b13, b2 = self.biases
        return fused_experts(x, w13, w2, experts, weights, self.first, b13, b2, self.moe.clamped)

    def slots(self, prefix: str) -> list[WeightSlot]:
        hidden, inner, local, here = self.hidden, self.inner, self.local, self.first_inner
        (start, stop), found = self.kept, []
        for at, to, many in self.halves:
            take = Box((start, 0, at), (stop, hidden, at + many))
            put = Box((0, 0, to), (self.count, hidden, to + many))
            shape, name = (self.total, hidden, 2 * inner), f"{prefix}.gate_up_proj"
            found.append(WeightSlot(name, shape, take, f"{prefix}.w13", put))
        take = Box((start, here, 0), (stop, here + local, hidden))
        put, shape = Box.full((self.count, local, hidden)), (self.total, inner, hidden)
        found.append(WeightSlot(f"{prefix}.down_proj", shape, take, f"{prefix}.w2", put))
        return [*found, *self.bias_slots(prefix)]


class QuantizedStacked(Experts, _Stacked):
    """``Experts`` of a checkpoint that stacks them, quantised: each expert has two tensors of its
    own, [2 inner, hidden] and [hidden, inner], into which what comes stacked is split
    (``weights.expert_names.STACKED``): scales are of the rows that a product has."""

    def __init__(self, build: Build) -> None:
        super().__init__(build)
        self.declare_biases()

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        assert self.scheme is not None
        return self._quantized(x, experts, weights, self.scheme, self.biases)

    def slots(self, prefix: str) -> list[WeightSlot]:
        both, down = self.stacked.rows or ("gate_up_proj", "down_proj")
        here, local = self.first_inner, self.local
        found = self.bias_slots(prefix)
        for index in range(self.total):
            at = index - self.first
            kept = 0 <= at < self.count
            for first, to, many in self.halves:
                take = Box((first, 0), (first + many, self.hidden))
                put = Box((at, to, 0), (at + 1, to + many, self.hidden)) if kept else _NOTHING_3D
                name, shape = f"{prefix}.{index}.{both}.weight", (2 * self.inner, self.hidden)
                take = take if kept else _NOTHING_2D
                found.append(WeightSlot(name, shape, take, f"{prefix}.w13", put))
            take = Box((0, here), (self.hidden, here + local)) if kept else _NOTHING_2D
            put = Box((at, 0, 0), (at + 1, self.hidden, local)) if kept else _NOTHING_3D
            name, shape = f"{prefix}.{index}.{down}.weight", (self.hidden, self.inner)
            found.append(WeightSlot(name, shape, take, f"{prefix}.w2", put))
        return found


class StackedRows(Experts):
    """``Experts`` of a checkpoint that stacks them as they lie here, under names beside the module;
    see ``StackedArch.rows``."""

    def slots(self, prefix: str) -> list[WeightSlot]:
        stacked = self.moe.arch.stacked
        assert stacked is not None
        assert stacked.rows is not None
        both, down = (sibling(prefix, f"{name}.weight") for name in stacked.rows)
        (start, stop), inner, local = self.kept, self.inner, self.local
        found = []
        for half in (0, 1):
            at = half * inner + self.first_inner
            take = Box((start, at, 0), (stop, at + local, self.hidden))
            put = Box((0, half * local, 0), (self.count, (half + 1) * local, self.hidden))
            shape = (self.total, 2 * inner, self.hidden)
            found.append(WeightSlot(both, shape, take, f"{prefix}.w13", put))
        take = Box((start, 0, self.first_inner), (stop, self.hidden, self.first_inner + local))
        put = Box.full((self.count, self.hidden, local))
        shape = (self.total, self.hidden, inner)
        return [*found, WeightSlot(down, shape, take, f"{prefix}.w2", put)]


def make_experts(build: Build) -> Experts | StackedExperts:
    """The experts of a layer, as the architecture's files have them."""
    assert build.config.moe is not None
    stacked = build.config.moe.arch.stacked
    if stacked is None:
        return Experts(build)
    if build.quantization is not None:
        return QuantizedStacked(build)
    return StackedRows(build) if stacked.rows else StackedExperts(build)


_NOTHING_2D, _NOTHING_3D = Box.full((0, 0)), Box.full((0, 0, 0))
