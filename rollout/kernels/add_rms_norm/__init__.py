"""Residual addition and root-mean-square normalisation in one."""

from torch import Tensor

from rollout.kernels.op import op
from rollout.kernels.rms_norm import rms_norm


@op
def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float | None = None
) -> tuple[Tensor, Tensor]:
    """``(rms_norm(x + residual), x + residual)``.

    x, residual: [..., D] of one dtype, in which the sum is rounded; weight: [D]. ``offset``: as in
    ``rms_norm``.
    """
    assert x.shape == residual.shape, f"x {x.shape} and residual {residual.shape} differ"
    total = x + residual
    return rms_norm.reference(total, weight, eps, offset), total
