"""Native ``rms_norm``: strided heads (a slice of a fused projection) are read in place."""

import torch
from torch import Tensor

from rollout.kernels.native import BF16, entry
from rollout.kernels.rms_norm import rms_norm as op


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    bf16 = BF16.get(x.dtype)
    if bf16 is None or weight.dtype != x.dtype or x.dim() == 0 or not weight.is_contiguous():
        return op.reference(x, weight, eps, offset)
    dim = x.shape[-1]
    assert weight.shape == (dim,), f"weight {weight.shape} does not fit x {x.shape}"
    if x.dim() != 3 or x.stride(2) != 1:
        x = x.contiguous()
    outer, inner, heads = (x.stride(0), x.stride(1), x.shape[1]) if x.dim() == 3 else (dim, 0, 1)
    out = torch.empty(x.shape, dtype=x.dtype)
    if not out.numel():
        return out
    entry("rms_norm")(
        *(x.data_ptr(), outer, inner, weight.data_ptr(), out.data_ptr(), out.numel() // dim),
        *(heads, dim, eps, offset or 0.0, offset is not None, bf16, torch.get_num_threads()),
    )
    return out
