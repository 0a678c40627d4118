"""Tensor-parallel linear layers: column, merged column (gate and up, q k v), and row."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from rollout.distributed import TensorParallel
from rollout.kernels import (
    batch_invariant_linear,
    finish_sums,
    gated_linear,
    segment_sums,
    silu_mul,
)
from rollout.kernels.batch_invariant_linear import segments_of
from rollout.models.layers.activations import gelu_tanh
from rollout.models.layers.base import Build, Layer, rows_slot, sibling, storage_of, whole_slot
from rollout.models.layers.ordered_experts import lanes_of
from rollout.weights import PLAIN, Box, WeightSlot


class MergedColumnLinear(Layer):
    """Several linears of one input, side by side; each is split by rows (outputs) over ranks.

    ``parts``: (source name beside this module, all its output rows). [T, inputs] -> [T, this
    rank's outputs], the parts in order. ``fused``: the checkpoint has them as one tensor, too, of
    this module's name.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        build: Build,
        inputs: int,
        parts: list[tuple[str, int]],
        bias: bool,
        fused: bool = False,
    ) -> None:
        super().__init__(build)
        self.inputs, self.fused = inputs, fused
        # (source, all rows, first row taken here, rows taken here)
        self.parts = [
            (name, rows, *self.share(index, rows)) for index, (name, rows) in enumerate(parts)
        ]
        self.outputs = sum(count for *_, count in self.parts)
        others = [(self.outputs_of(size, parts), inputs) for size in build.alike]
        self.declare_linear((self.outputs, inputs), *others)
        self.register_parameter("bias", None)
        if bias:
            self.declare("bias", (self.outputs,))

    def share(self, index: int, rows: int) -> tuple[int, int]:
        """First row and number of rows of part ``index`` on this rank."""
        return self.share_of(self.build.tp, index, rows)

    def share_of(self, tp: TensorParallel, index: int, rows: int) -> tuple[int, int]:
        """The same on any rank."""
        count = rows // tp.size
        return tp.rank * count, count

    def outputs_of(self, size: int, parts: list[tuple[str, int]]) -> int:
        """How many rows a rank of ``size`` has."""
        tp = TensorParallel(0, size)
        return sum(self.share_of(tp, index, rows)[1] for index, (_, rows) in enumerate(parts))

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.bias)

    def gated(self, x: Tensor) -> Tensor:
        """act(first part) * second part, of two equal parts."""
        activation = self.build.config.activation
        if activation != "silu":
            gate, up = self.forward(x).chunk(2, dim=-1)
            if self.build.deterministic and activation == "gelu_tanh":
                return gelu_tanh(gate) * up
            return gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up
        if self.is_adapted:
            return silu_mul(self.forward(x))
        spec = self.specs["weight"]
        if spec.scheme is not None:
            return self.matmul(x, self.bias, gated=True)
        if self.build.deterministic:
            return silu_mul(self.forward(x))
        rows, columns = spec.shape
        weight = storage_of(self, "weight")
        return gated_linear(x, weight, self.bias, spec.layout, (rows, columns))

    def slots(self, prefix: str) -> list[WeightSlot]:
        result, at, before = [], 0, 0
        everything = sum(rows for _, rows, *_ in self.parts)
        for name, rows, first, count in self.parts:
            for field in self.specs:
                source, total = f"{sibling(prefix, name)}.{field}", rows
                if self.fused:
                    source, total = f"{prefix}.{field}", everything
                shape = (total, self.inputs) if field == "weight" else (total,)
                begin = before + first if self.fused else first
                result.append(rows_slot(source, shape, begin, count, f"{prefix}.{field}", at))
            at += count
            before += rows
        return result


class QKVLinear(MergedColumnLinear):
    """Queries, keys and values of this rank's heads: [T, inputs] -> [T, (q + 2 kv) x head_dim],
    q being the heads, or twice as many rows where each has a gate behind it.

    With more ranks than KV heads, each KV head is held by ``size / kv_heads`` neighbouring ranks.
    ``inputs``: by default the hidden size.
    """

    def __init__(self, build: Build, inputs: int | None = None) -> None:
        config = build.config
        heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        heads *= 2 if config.arch.gated else 1
        parts = [("q_proj", heads), ("k_proj", kv), ("v_proj", kv)]
        inputs = inputs or config.hidden_size
        super().__init__(build, inputs, parts, config.qkv_bias, config.arch.fused_qkv)

    def share_of(self, tp: TensorParallel, index: int, rows: int) -> tuple[int, int]:
        config = self.build.config
        if index == 0 or config.num_kv_heads >= tp.size:
            return super().share_of(tp, index, rows)
        head = tp.rank // (tp.size // config.num_kv_heads)
        return head * config.head_dim, config.head_dim


class ReplicatedLinear(Layer):
    """A linear that every rank holds whole: [T, inputs] -> [T, outputs].

    ``tiled``: its weight is worth the layout of the others. ``of_parts``: its inputs are this
    rank's part of a sum, and its outputs are added up.
    """

    of_parts = False

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, build: Build, inputs: int, outputs: int, bias: bool = False, *, tiled: bool = False
    ) -> None:
        super().__init__(build)
        shape = (outputs, inputs)
        if tiled:
            self.declare_linear(shape)
        else:
            self.declare("weight", shape)
        self.register_parameter("bias", None)
        if bias:
            self.declare("bias", (outputs,))

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.bias)

    def slots(self, prefix: str) -> list[WeightSlot]:
        return [
            whole_slot(f"{prefix}.{field}", self.specs[field].shape, f"{prefix}.{field}")
            for field in ("weight", "bias")
            if field in self.specs
        ]


class RowLinear(Layer):
    """A linear whose inputs are split over ranks: [T, this rank's inputs] -> [T, outputs].

    One all-reduce per call; the bias is replicated and added once, after the sum.
    ``reduce=False`` leaves the sum to the caller: this rank's part, without a bias; deterministic
    its lanes, see ``ordered_experts``.

    Deterministic, the inputs of all ranks are cut into ``segments``, as many whatever the number
    of ranks is, which divides it: each is summed by itself in float32, their sums are added in one
    binary tree whose branches the ranks have, and what comes out is rounded once.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, build: Build, inputs: int, outputs: int, bias: bool, reduce: bool = True
    ) -> None:
        super().__init__(build)
        assert reduce or not bias, "a bias is added after the sum"
        self.reduce = reduce
        self.inputs, self.local = inputs, inputs // build.tp.size
        self.segments = 1
        if build.deterministic and not reduce:  # in the layout of experts
            self.declare("weight", (outputs, self.local))
            self.segments = lanes_of(build)
        else:
            self.declare_linear(
                (outputs, self.local), *((outputs, inputs // size) for size in build.alike)
            )
        if build.deterministic and reduce:
            tiled = self.specs["weight"].layout is not PLAIN
            self.segments = segments_of(inputs, even=tiled)
        if build.deterministic:
            assert self.segments % build.tp.size == 0, "ranks divide the inputs, too"
        self.register_parameter("bias", None)
        if bias:
            self.declare("bias", (outputs,))

    def forward(self, x: Tensor) -> Tensor:
        tp = self.build.tp
        if self.build.deterministic:
            return self._in_order(x) if self.reduce else self._lanes(x)
        if tp.size == 1 or not self.reduce:
            return self.matmul(x, self.bias)
        y = tp.all_reduce(self.matmul(x))
        return y if self.bias is None else y.add_(self.bias)

    def _lanes(self, x: Tensor) -> Tensor:
        """[T, inputs here] -> float32 [lanes here, T, outputs]."""
        sums = segment_sums(x, storage_of(self, "weight"), self.segments // self.build.tp.size)
        if self.adapters is not None and not self.adapters.is_idle:
            sums[0] += self.adapters.add(torch.zeros_like(sums[0], dtype=x.dtype), x)
            for lane in sums:
                self.adapters.scale(lane)
        return sums

    def _in_order(self, x: Tensor) -> Tensor:
        """``forward`` where all numbers of ranks give the same bits."""
        tp, spec = self.build.tp, self.specs["weight"]
        rows, columns = spec.shape
        weight, here = storage_of(self, "weight"), self.segments // tp.size
        if tp.size == 1:
            y = batch_invariant_linear(x, weight, self.bias, spec.layout, (rows, columns), here)
            return self.adapted(y, x, self.bias)
        shape = (rows, columns)
        sums = batch_invariant_linear(x, weight, None, spec.layout, shape, here, wide=True)
        if self.adapters is not None and not self.adapters.is_idle:
            # Of ranks' parts of the adapter's inputs: this sum does depend on how many they are.
            sums += self.adapters.add(torch.zeros_like(sums, dtype=x.dtype), x)
            self.adapters.scale(sums)
        return finish_sums(tp.tree_sum(sums), self.bias, x.dtype)

    def slots(self, prefix: str) -> list[WeightSlot]:
        outputs, first = self.specs["weight"].shape[0], self.build.tp.rank * self.local
        take = Box((0, first), (outputs, first + self.local))
        put = Box.full((outputs, self.local))
        name = f"{prefix}.weight"
        result = [WeightSlot(name, (outputs, self.inputs), take, name, put)]
        if "bias" in self.specs:
            result.append(whole_slot(f"{prefix}.bias", (outputs,), f"{prefix}.bias"))
        return result
