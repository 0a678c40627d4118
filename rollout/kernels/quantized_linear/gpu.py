"""``quantized_linear`` on a GPU: the library's products of int8 and float8, and a kernel of
few rows that reads codes alone. Not measured yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from rollout.kernels.gpu_launch import FLOATS, launch, multiply, narrow
from rollout.kernels.gpu_weight_codes import KINDS, code_values, scale_values
from rollout.kernels.quantized_linear import plain_codes, quantize_rows
from rollout.kernels.quantized_linear import quantized_linear as op
from rollout.kernels.silu_mul.gpu import silu_mul
from rollout.weights import Layout
from rollout.weights.quantization import Scheme

LEAST_ROWS = 17  # of torch._int_mm
FLOAT8 = (8, 9)  # compute capability from which there are products of float8
FEW_ROWS = 64  # up to which weights are multiplied as they are read; more are dequantised before
_OUTPUTS, _INPUTS = 32, 128


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
    if scheme.columns and layout.name == "plain" and x.dtype in FLOATS:
        flat = x.reshape(-1, shape[1])
        if 0 < len(flat) <= FEW_ROWS and codes.is_contiguous() and scales.is_contiguous():
            out = _of_few(flat, codes, scales, bias, shape, scheme)
            out = out.view(*x.shape[:-1], shape[0])
            return silu_mul(out) if gated else out
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


def _of_few(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int],
    scheme: Scheme,
) -> Tensor:
    """x [rows, K]; each weight is rounded to the dtype of x, as if it had been dequantised."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (rows, inputs), outputs = x.shape, shape[0]
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    launch(
        _multiply,
        (triton.cdiv(outputs, _OUTPUTS),),
        *(x, codes, scales, out if bias is None else bias.contiguous(), out),
        *(x.stride(0), rows, outputs, inputs, scales.shape[1], scheme.columns),
        BIAS=bias is not None,
        ROWS=max(16, triton.next_power_of_2(rows)),
        OUTPUTS=_OUTPUTS,
        INPUTS=_INPUTS // (2 if x.element_size() == 4 else 1),
        IEEE=x.dtype == torch.float32,
        KIND=KINDS[scheme.codes],
        stages=3,
    )
    return out


@triton.jit
def _multiply(
    x, codes, scales, bias, out, x_row, rows, outputs, inputs, cells, columns,
    BIAS: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr,
    IEEE: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """All rows and some outputs."""
    row, output = tl.arange(0, ROWS), tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    live, kept = row < rows, output < outputs
    of_output = output.to(tl.int64) * (inputs // 2 if KIND == 3 else inputs)
    of_scale = output.to(tl.int64) * cells
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        some = at < inputs
        a = tl.load(
            x + row[:, None] * x_row + at[None, :], mask=live[:, None] & some[None, :], other=0.0
        )
        there = some[:, None] & kept[None, :]
        held = at // 2 if KIND == 3 else at
        code = tl.load(codes + of_output[None, :] + held[:, None], mask=there, other=0)
        cell = of_scale[None, :] + (at // columns)[:, None]
        scale = scale_values(tl.load(scales + cell, mask=there, other=0), KIND)
        b = narrow(code_values(code, at[:, None], KIND) * scale, x.dtype.element_ty)
        total = multiply(a, b, total, IEEE)
    if BIAS:
        total += tl.load(bias + output, mask=kept, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * outputs + output[None, :],
        narrow(total, out.dtype.element_ty),
        mask=live[:, None] & kept[None, :],
    )
