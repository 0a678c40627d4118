"""Triton ``dequantize``: each code is read once, and what it stands for is written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.dequantize import dequantize as op
from rollout.kernels.gpu_launch import FLOATS, launch, narrow
from rollout.kernels.gpu_weight_codes import KINDS, code_values, scale_values
from rollout.weights.quantization import Scheme

_COLUMNS = 1024


def dequantize(codes: Tensor, scales: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    if dtype not in FLOATS or not codes.numel():
        return op.reference(codes, scales, scheme, dtype)
    codes = codes.contiguous()
    scales = None if scales is None else scales.contiguous()
    columns = codes.shape[-1] * scheme.per_byte
    out = torch.empty((*codes.shape[:-1], columns), dtype=dtype, device=codes.device)
    launch(
        _widen,
        (out.numel() // columns, triton.cdiv(columns, _COLUMNS)),
        *(codes, codes if scales is None else scales, out, columns),
        *(1 if scales is None else scales.shape[-1], scheme.columns or columns),
        KIND=KINDS[scheme.codes],
        SCALED=scales is not None,
        COLUMNS=_COLUMNS,
    )
    return out


@triton.jit
def _widen(
    codes, scales, out, columns, cells, cell,
    KIND: tl.constexpr, SCALED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    held, live = (at // 2 if KIND == 3 else at), at < columns
    bytes_of_row = columns // 2 if KIND == 3 else columns
    value = code_values(tl.load(codes + row * bytes_of_row + held, mask=live, other=0), at, KIND)
    if SCALED:
        scale = tl.load(scales + row * cells + at // cell, mask=live, other=0)
        value *= scale_values(scale, KIND)
    tl.store(out + row * columns + at, narrow(value, out.dtype.element_ty), mask=live)
