"""Triton ``add_rms_norm``: the sum is written once and normalised while it is in registers."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.add_rms_norm import add_rms_norm as op
from rollout.kernels.rms_norm.gpu import normalise, takes


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float | None = None
) -> tuple[Tensor, Tensor]:
    if not takes(x, weight) or residual.dtype != x.dtype:
        return op.reference(x, residual, weight, eps, offset)
    dim = x.shape[-1]
    assert x.shape == residual.shape, f"x {x.shape} and residual {residual.shape} differ"
    assert weight.shape == (dim,), f"weight {weight.shape} does not fit x {x.shape}"
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    normalise(x, residual, weight, out, total, dim, 0, 1, eps, offset, residual=True)
    return out, total
