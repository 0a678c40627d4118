"""``quantized_linear`` on a GPU: the library's products of int8 and float8. Not measured yet."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.kernels.quantized_linear import plain_codes, quantize_rows
from rollout.kernels.quantized_linear import quantized_linear as op
from rollout.kernels.silu_mul.gpu import silu_mul
from rollout.weights import Layout
from rollout.weights.quantization import Scheme

LEAST_ROWS = 17  # of torch._int_mm
FLOAT8 = (8, 9)  # compute capability from which there are products of float8


def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    scheme: Scheme,
    gated: bool = False,
) -> Tensor:
    if scheme.columns or shape[0] % 16 or shape[1] % 16 or not x.numel() or not _knows(x, scheme):
        return op.reference(x, codes, scales, bias, layout, shape, scheme, gated)
    quantized, factors = quantize_rows(x.reshape(-1, shape[1]), scheme)
    weight, rows = plain_codes(codes, layout, shape, scheme).t(), len(quantized)
    if scheme.codes == "int8":
        if rows < LEAST_ROWS:
            quantized = pad(quantized, (0, 0, 0, LEAST_ROWS - rows))
        out = torch._int_mm(quantized, weight)[:rows] * (factors * scales[:, 0])
        out = out if bias is None else out.add_(bias)
    else:
        out = torch._scaled_mm(
            quantized, weight.view(torch.float8_e4m3fn), factors, scales.view(1, -1), bias,
            out_dtype=torch.bfloat16,
        )  # fmt: skip
    out = out.to(x.dtype).view(*x.shape[:-1], shape[0])
    return silu_mul(out) if gated else out


def _knows(x: Tensor, scheme: Scheme) -> bool:
    if scheme.codes == "int8":
        return True
    on_card = x.is_cuda and torch.cuda.get_device_capability(x.device) >= FLOAT8
    return on_card and x.dtype == torch.bfloat16
