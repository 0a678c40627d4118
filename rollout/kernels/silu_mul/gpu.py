"""Triton ``silu_mul``: one pass, nothing between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, launch, narrow, power_of_2, rounded, silu
from rollout.kernels.silu_mul import silu_mul as op

_BLOCK = 1024


def silu_mul(x: Tensor) -> Tensor:
    if x.dtype not in FLOATS or x.dim() == 0:
        return op.reference(x)
    assert x.shape[-1] % 2 == 0, f"the last dimension of {x.shape} is odd"
    dim = x.shape[-1] // 2
    if x.dim() != 2 or x.stride(1) != 1:
        x = x.contiguous()
    out = torch.empty((*x.shape[:-1], dim), dtype=x.dtype, device=x.device)
    stride = x.stride(0) if x.dim() == 2 else 2 * dim
    rows, block = out.numel() // max(1, dim), min(_BLOCK, power_of_2(dim))
    launch(_gate, (rows, triton.cdiv(dim, block)), x, out, stride, dim, BLOCK=block)
    return out


@triton.jit
def _gate(x, out, stride, dim, BLOCK: tl.constexpr):
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < dim
    gate = tl.load(x + row * stride + column, mask=live, other=0.0).to(tl.float32)
    up = tl.load(x + row * stride + dim + column, mask=live, other=0.0).to(tl.float32)
    value = rounded(silu(gate), dtype) * up
    tl.store(out + row * dim + column, narrow(value, dtype), mask=live)
