"""``gated_linear`` on a GPU: torch's matrix product, then one pass of the gate."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels.linear import linear
from rollout.kernels.silu_mul.gpu import silu_mul
from rollout.weights import Layout


def gated_linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    return silu_mul(linear.reference(x, storage, bias, layout, shape))
