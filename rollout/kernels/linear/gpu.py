"""Triton ``linear`` of few rows, which costs what reading the weight does; more are torch's.

torch's library leaves a quarter of the memory's rate unused there, and its kernels end before the
next one is launched. One row is no matrix product: a program adds up the products of some outputs,
whose weights it asks for before it waits for the kernel that computes the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import (
    await_kernel_before,
    launch,
    multiply,
    narrow,
    rounded,
    silu,
)
from rollout.kernels.linear import linear as op
from rollout.weights import Layout

MOST_ROWS = 16  # of a tile of the matrix unit
_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Cut:
    """Outputs and inputs that a program works on at a time."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 2


ONE, FEW = Cut(8, 1024, 4), Cut(32, 128, 4, 5)


def linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    if not takes(x, storage, bias, layout):
        return op.reference(x, storage, bias, layout, shape)
    return multiply_rows(x, storage, bias)


def takes(x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout) -> bool:
    """Whether ``multiply_rows`` does, and is worth it: its inputs are whole lines of memory."""
    rows = x.numel() // max(1, x.shape[-1])
    alike = x.dtype == storage.dtype and (bias is None or bias.dtype == x.dtype)
    whole = layout.name == "plain" and storage.is_contiguous() and x.shape[-1] % 64 == 0
    return alike and whole and x.dtype in _DTYPES and 0 < rows <= MOST_ROWS


def multiply_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool = False, cut: Cut | None = None
) -> Tensor:
    """Of at most ``MOST_ROWS`` rows; ``gated``: silu of the first half times the second."""
    outputs, inputs = weight.shape
    assert x.shape[-1] == inputs, f"x {x.shape} does not fit a weight of {weight.shape}"
    outputs = outputs // 2 if gated else outputs
    flat = x.reshape(-1, inputs)
    flat = flat if flat.stride(1) == 1 else flat.contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype, device=x.device)
    cut = cut or (ONE if len(flat) == 1 else FEW)
    arguments = (flat, weight, out if bias is None else bias, out)
    constants: dict[str, Any] = {"BIAS": bias is not None, "GATED": gated}
    constants |= {"OUTPUTS": cut.outputs, "INPUTS": cut.inputs}
    grid = (triton.cdiv(outputs, cut.outputs),)
    if len(flat) == 1:
        sizes = (outputs, inputs)
        launch(_one, grid, *arguments, *sizes, warps=cut.warps, overlap=True, **constants)
    else:
        launch(
            _few,
            grid,
            *(*arguments, flat.stride(0), len(flat), outputs, inputs),
            ROWS=MOST_ROWS,
            warps=cut.warps,
            stages=cut.stages,
            overlap=True,
            **constants,
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


@triton.jit
def _few(
    x,
    weight,
    bias,
    out,
    stride,
    rows,
    outputs,
    inputs,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_kernel_before(OVERLAP)
    dtype = out.dtype.element_ty
    row = tl.arange(0, ROWS)
    output = tl.program_id(0).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    here, there = (row < rows)[:, None], (output < outputs)[None, :]
    given = x + row[:, None] * stride + column[None, :]
    first = weight + output[None, :] * inputs + column[:, None]
    second = weight + (output + outputs)[None, :] * inputs + column[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    beside = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for begin in range(0, inputs, INPUTS):
        real = begin + column < inputs
        held = tl.load(given + begin, mask=here & real[None, :], other=0.0)
        mask = there & real[:, None]
        total = multiply(held, tl.load(first + begin, mask=mask, other=0.0), total, False)
        if GATED:
            beside = multiply(held, tl.load(second + begin, mask=mask, other=0.0), beside, False)
    if BIAS:
        total += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        if BIAS:
            some = tl.load(bias + outputs + output, mask=output < outputs, other=0.0)
            beside += some.to(tl.float32)[None, :]
        total = rounded(silu(rounded(total, dtype)), dtype) * rounded(beside, dtype)
    at = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(out + at, narrow(total, dtype), mask=here & there)
