"""Triton ``linear`` of one row, which costs what reading the weight does; more are torch's.

One row is no matrix product: a program adds up the products of some outputs, whose weights it asks
for before it waits for the kernel that computes the row. From two rows on the matrix unit is used,
and torch's library was as fast as what was tried beside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import (
    await_kernel_before,
    launch,
    narrow,
    power_of_2,
    rounded,
    silu,
)
from rollout.kernels.linear import linear as op
from rollout.weights import Layout

# Outputs and inputs that a program works on at a time: on an H200 the best of nine over the linears
# of 1 B and 8 B parameters.
_OUTPUTS, _INPUTS = 4, 2048
_DTYPES = (torch.bfloat16, torch.float16)


def linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    if not takes(x, storage, bias, layout):
        return op.reference(x, storage, bias, layout, shape)
    return multiply_row(x, storage, bias)


def takes(x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout) -> bool:
    """Whether ``multiply_row`` does: one row, whose weights lie in whole lines of memory."""
    alike = x.dtype == storage.dtype and (bias is None or bias.dtype == x.dtype)
    whole = layout.name == "plain" and storage.is_contiguous() and x.shape[-1] % 64 == 0
    return alike and whole and x.dtype in _DTYPES and x.numel() == x.shape[-1] > 0


def multiply_row(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False) -> Tensor:
    """``gated``: silu of the first half of the outputs times the second."""
    outputs, inputs = weight.shape
    assert x.shape[-1] == inputs, f"x {x.shape} does not fit a weight of {weight.shape}"
    outputs = outputs // 2 if gated else outputs
    x = x if x.stride(-1) == 1 else x.contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    launch(
        _one,
        (triton.cdiv(outputs, _OUTPUTS),),
        *(x, weight, out if bias is None else bias, out, outputs, inputs),
        BIAS=bias is not None,
        GATED=gated,
        OUTPUTS=_OUTPUTS,
        INPUTS=min(_INPUTS, power_of_2(inputs)),
        warps=4,
        overlap=True,
    )
    return out


@triton.jit
def _one(
    x,
    weight,
    bias,
    out,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    dtype = out.dtype.element_ty
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    live = (output < outputs)[:, None]
    first = weight + output[:, None] * inputs + column[None, :]
    second = weight + (output + outputs)[:, None] * inputs + column[None, :]
    mask = live & (column < inputs)[None, :]
    # No kernel writes weights: they are on their way when the row is there.
    a = tl.load(first, mask=mask, other=0.0)
    if GATED:
        b = tl.load(second, mask=mask, other=0.0)
    await_kernel_before(OVERLAP)
    row = tl.load(x + column, mask=column < inputs, other=0.0).to(tl.float32)[None, :]
    total = a.to(tl.float32) * row
    if GATED:
        beside = b.to(tl.float32) * row
    for begin in range(INPUTS, inputs, INPUTS):
        real = begin + column < inputs
        mask = live & real[None, :]
        row = tl.load(x + begin + column, mask=real, other=0.0).to(tl.float32)[None, :]
        total += tl.load(first + begin, mask=mask, other=0.0).to(tl.float32) * row
        if GATED:
            beside += tl.load(second + begin, mask=mask, other=0.0).to(tl.float32) * row
    value = tl.sum(total, 1)
    there = output < outputs
    if BIAS:
        value += tl.load(bias + output, mask=there, other=0.0).to(tl.float32)
    if GATED:
        up = tl.sum(beside, 1)
        if BIAS:
            up += tl.load(bias + outputs + output, mask=there, other=0.0).to(tl.float32)
        value = rounded(silu(rounded(value, dtype)), dtype) * rounded(up, dtype)
    tl.store(out + output, narrow(value, dtype), mask=there)
