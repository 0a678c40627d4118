"""Native ``add_rms_norm``: one pass over the two inputs."""

import torch
from torch import Tensor

from rollout.kernels.add_rms_norm import add_rms_norm as op
from rollout.kernels.native import BF16, entry


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, offset: float | None = None
) -> tuple[Tensor, Tensor]:
    bf16 = BF16.get(x.dtype)
    alike = x.dtype == residual.dtype == weight.dtype and weight.is_contiguous()
    if bf16 is None or not alike or x.dim() == 0:
        return op.reference(x, residual, weight, eps, offset)
    dim = x.shape[-1]
    assert x.shape == residual.shape, f"x {x.shape} and residual {residual.shape} differ"
    assert weight.shape == (dim,), f"weight {weight.shape} does not fit x {x.shape}"
    x, residual = x.contiguous(), residual.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    if not out.numel():
        return out, total
    entry("add_rms_norm")(
        *(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), total.data_ptr()),
        *(out.numel() // dim, dim, eps, offset or 0.0, offset is not None),
        *(bf16, torch.get_num_threads()),
    )
    return out, total
