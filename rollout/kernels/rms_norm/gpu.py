"""Triton ``rms_norm`` and ``add_rms_norm``: some rows per program, strided heads read in place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import (
    FLOATS,
    await_kernel_before,
    few_tokens,
    launch,
    narrow,
    power_of_2,
    rounded,
)
from rollout.kernels.rms_norm import rms_norm as op

_AT_ONCE = 4096  # elements of one program; a row's bits never depend on how many rows there are
_MAX_DIM = 65536


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    if not takes(x, weight):
        return op.reference(x, weight, eps, offset)
    dim = x.shape[-1]
    assert weight.shape == (dim,), f"weight {weight.shape} does not fit x {x.shape}"
    if x.dim() != 3 or x.stride(2) != 1:
        x = x.contiguous()
    outer, inner, heads = (x.stride(0), x.stride(1), x.shape[1]) if x.dim() == 3 else (dim, 0, 1)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    normalise(x, x, weight, out, out, outer, inner, heads, eps, offset, residual=False)
    return out


def takes(x: Tensor, weight: Tensor) -> bool:
    alike = x.dtype in FLOATS and weight.dtype == x.dtype and weight.is_contiguous()
    return alike and x.dim() > 0 and x.shape[-1] <= _MAX_DIM


def normalise(
    x: Tensor,
    other: Tensor,
    weight: Tensor,
    out: Tensor,
    total: Tensor,
    outer: int,
    inner: int,
    heads: int,
    eps: float,
    offset: float | None,
    *,
    residual: bool,
) -> None:
    """Row r of x starts at ``r // heads * outer + r % heads * inner``; the others are dense."""
    dim = x.shape[-1]
    block = power_of_2(dim)
    at_once = max(1, _AT_ONCE // block)
    rows = out.numel() // max(1, dim)
    launch(
        _normalise,
        (triton.cdiv(rows, at_once),),
        x,
        other,
        weight,
        out,
        total,
        rows,
        outer,
        inner,
        heads,
        eps,
        0.0 if offset is None else offset,
        DIM=dim,
        BLOCK=block,
        ROWS=at_once,
        RESIDUAL=residual,
        WIDE=offset is not None,
        warps=4 if block <= _AT_ONCE else 8,
        overlap=few_tokens(rows // heads),
    )


@triton.jit(do_not_specialize=["rows"])
def _normalise(
    x,
    other,
    weight,
    out,
    total,
    rows,
    outer,
    inner,
    heads,
    eps,
    offset,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    WIDE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_kernel_before(OVERLAP)
    dtype = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    live = (row < rows)[:, None] & (column < DIM)[None, :]
    start = row // heads * outer + row % heads * inner
    dense = row[:, None] * DIM + column[None, :]
    values = tl.load(x + start[:, None] + column[None, :], mask=live, other=0.0).to(tl.float32)
    if RESIDUAL:
        values += tl.load(other + dense, mask=live, other=0.0).to(tl.float32)
        values = rounded(values, dtype)
        tl.store(total + dense, narrow(values, dtype), mask=live)
    scale = tl.rsqrt(tl.sum(values * values, 1) / DIM + eps)
    scaled = values * scale[:, None]
    factor = tl.load(weight + column, mask=column < DIM, other=0.0).to(tl.float32)
    if WIDE:
        factor += offset
    else:
        scaled = rounded(scaled, dtype)
    tl.store(out + dense, narrow(scaled * factor[None, :], dtype), mask=live)
