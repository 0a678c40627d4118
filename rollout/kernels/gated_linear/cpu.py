"""Native ``gated_linear``: a gate and what it scales come out of the same loop over x."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels.linear import cpu, linear
from rollout.kernels.silu_mul import silu_mul
from rollout.weights import Layout


def gated_linear(
    x: Tensor,
    storage: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    *,
    at_level: int | None = None,
) -> Tensor:
    """``at_level`` as in ``linear``."""
    if shape[0] % (2 * cpu.TILE_ROWS) or not cpu.takes(x, storage, bias, layout):
        return silu_mul(linear(x, storage, bias, layout, shape))
    return cpu.multiply_tiles(x, storage, bias, shape, gated=True, at_level=at_level)
