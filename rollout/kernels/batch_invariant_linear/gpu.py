"""Triton ``batch_invariant_linear``: one tile size for any batch, one order over the inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.batch_invariant_linear import batch_invariant_linear as op
from rollout.kernels.gpu_launch import FLOATS, launch, multiply, narrow
from rollout.weights import Box, Layout

_ROWS, _OUTPUTS = 64, 32  # narrow tiles: at a small batch they still occupy the device
_BYTES = 128  # of a row in one step over the inputs


def batch_invariant_linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    alike = x.dtype == storage.dtype and (bias is None or bias.dtype == x.dtype)
    if x.dtype not in FLOATS or not alike:
        return op.reference(x, storage, bias, layout, shape)
    plain = layout.name == "plain"
    weight = (storage if plain else layout.read(storage, shape, Box.full(shape))).contiguous()
    outputs, inputs = shape
    assert x.shape[-1] == inputs, f"x {x.shape} does not fit a weight of shape {shape}"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    launch(
        _multiply,
        (triton.cdiv(len(flat), _ROWS), triton.cdiv(outputs, _OUTPUTS)),
        *(flat, weight, out if bias is None else bias, out),
        *(flat.stride(0), len(flat), outputs, inputs),
        BIAS=bias is not None,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_BYTES // x.element_size(),
        IEEE=x.dtype == torch.float32,
        stages=4,
    )
    return out


@triton.jit
def _multiply(
    x,
    weight,
    bias,
    out,
    stride,
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IEEE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, inputs, INPUTS):
        at = start + tl.arange(0, INPUTS)
        some = at < inputs
        a = tl.load(
            x + row[:, None] * stride + at[None, :],
            mask=(row < rows)[:, None] & some[None, :],
            other=0.0,
        )
        b = tl.load(
            weight + output[None, :] * inputs + at[:, None],
            mask=(output < outputs)[None, :] & some[:, None],
            other=0.0,
        )
        total = multiply(a, b, total, IEEE)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * outputs + output[None, :],
        narrow(total, out.dtype.element_ty),
        mask=(row < rows)[:, None] & (output < outputs)[None, :],
    )
