"""Triton ``batch_invariant_linear``: one tile size for any batch, one order over the inputs."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.batch_invariant_linear import batch_invariant_linear as op
from rollout.kernels.batch_invariant_linear import finish_sums as finish
from rollout.kernels.batch_invariant_linear import segment_sums as apart
from rollout.kernels.gpu_launch import FLOATS, launch, multiply, narrow
from rollout.weights import Box, Layout

_ROWS, _OUTPUTS = 64, 32  # narrow tiles: at a small batch they still occupy the device
_BYTES = 128  # of a row in one step over the inputs


def batch_invariant_linear(
    x: Tensor,
    storage: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    segments: int = 1,
    wide: bool = False,
) -> Tensor:
    bias = None if wide else bias
    alike = x.dtype == storage.dtype and (bias is None or bias.dtype == x.dtype)
    if x.dtype not in FLOATS or not alike:
        return op.reference(x, storage, bias, layout, shape, segments, wide)
    plain = layout.name == "plain"
    weight = (storage if plain else layout.read(storage, shape, Box.full(shape))).contiguous()
    outputs, inputs = shape
    assert x.shape[-1] == inputs, f"x {x.shape} does not fit a weight of shape {shape}"
    assert inputs % segments == 0, f"{inputs} inputs make no {segments} equal segments"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = torch.empty(
        (*x.shape[:-1], outputs), dtype=torch.float32 if wide else x.dtype, device=x.device
    )
    launch(
        _multiply,
        (triton.cdiv(len(flat), _ROWS), triton.cdiv(outputs, _OUTPUTS)),
        *(flat, weight, out if bias is None else bias, out),
        *(flat.stride(0), len(flat), outputs, inputs),
        BIAS=bias is not None,
        ROWS=_ROWS,
        OUTPUTS=_OUTPUTS,
        INPUTS=_BYTES // x.element_size(),
        SEGMENTS=segments,
        IEEE=x.dtype == torch.float32,
        stages=4,
    )
    return out


finish_sums, segment_sums = finish.reference, apart.reference


@triton.jit(do_not_specialize=["rows"])
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
    SEGMENTS: tl.constexpr,
    IEEE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    output = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    x += row[:, None] * stride
    weight += output[None, :] * inputs
    here, there = (row < rows)[:, None], (output < outputs)[None, :]
    length = inputs // SEGMENTS
    total = _sum(x, weight, here, there, 0, length, ROWS, OUTPUTS, INPUTS, IEEE)
    if SEGMENTS > 1:
        total += _sum(x, weight, here, there, length, length, ROWS, OUTPUTS, INPUTS, IEEE)
    if SEGMENTS > 2:
        right = _sum(x, weight, here, there, 2 * length, length, ROWS, OUTPUTS, INPUTS, IEEE)
        right += _sum(x, weight, here, there, 3 * length, length, ROWS, OUTPUTS, INPUTS, IEEE)
        total += right
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + row[:, None] * outputs + output[None, :],
        narrow(total, out.dtype.element_ty),
        mask=here & there,
    )


@triton.jit
def _sum(
    x,
    weight,
    here,
    there,
    first,
    length,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    IEEE: tl.constexpr,
):
    """The products over one segment: ``length`` inputs from ``first`` on."""
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for start in range(0, length, INPUTS):
        at = start + tl.arange(0, INPUTS)
        some = at < length
        a = tl.load(x + first + at[None, :], mask=here & some[None, :], other=0.0)
        b = tl.load(weight + first + at[:, None], mask=there & some[:, None], other=0.0)
        total = multiply(a, b, total, IEEE)
    return total
