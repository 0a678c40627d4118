"""``gated_linear`` on a GPU: of one row one kernel, else torch's matrix product and one pass."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels.linear import gpu, linear
from rollout.kernels.silu_mul.gpu import silu_mul
from rollout.weights import Layout


def gated_linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    if gpu.takes(x, storage, bias, layout):
        return gpu.multiply_row(x, storage, bias, gated=True)
    return silu_mul(linear.reference(x, storage, bias, layout, shape))
