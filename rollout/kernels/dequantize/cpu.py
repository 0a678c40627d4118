"""Native ``dequantize`` of float8 and four bits to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.dequantize import dequantize as op
from rollout.kernels.native import entry
from rollout.weights.quantization import Scheme


def dequantize(codes: Tensor, scales: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    if dtype != torch.bfloat16 or scheme.codes == "int8" or not codes.numel():
        return op.reference(codes, scales, scheme, dtype)
    codes = codes.contiguous()
    scales = None if scales is None else scales.contiguous()
    columns = codes.shape[-1] * scheme.per_byte
    out = torch.empty((*codes.shape[:-1], columns), dtype=dtype)
    entry("dequantize")(
        *(codes.data_ptr(), None if scales is None else scales.data_ptr(), out.data_ptr()),
        *(out.numel() // columns, columns, scheme.columns or columns, scheme.per_byte == 2),
        torch.get_num_threads(),
    )
    return out
