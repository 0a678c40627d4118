"""Triton ``lora_linear``: one kernel down to the rank, one up to the outputs."""

from __future__ import annotations

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, launch, multiply, narrow, power_of_2
from rollout.kernels.lora_linear import MOST_RANK, TILE, lora_work
from rollout.kernels.lora_linear import lora_linear as op

_BLOCK_K, _BLOCK_N = 128, 128


def lora_linear(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    bounds: tuple[int, ...],
    rows: Tensor,
    tiles: Tensor,
) -> None:
    parts, rank, inputs = a.shape[1:]
    if y.dtype not in FLOATS or not y.dtype == x.dtype == a.dtype == b.dtype or rank > MOST_RANK:
        op.reference(y, x, a, b, scales, bounds, rows, tiles)
        return
    assert y.stride(1) == x.stride(1) == 1
    work, count = lora_work(rows, a), len(tiles)
    width, ieee = max(16, power_of_2(rank)), y.dtype == torch.float32
    launch(
        _down, (count, parts), x, a, scales, rows, tiles, work, x.stride(0), inputs, parts, rank,
        ROWS=TILE, RANK=width, BLOCK=_BLOCK_K, IEEE=ieee,
    )  # fmt: skip
    for part, (first, last) in enumerate(pairwise(bounds)):
        grid = (count, triton.cdiv(last - first, _BLOCK_N))
        launch(
            _up, grid, y, b, scales, rows, tiles, work, y.stride(0), y.shape[1], parts, rank, part,
            first, last, ROWS=TILE, RANK=width, BLOCK=_BLOCK_N,
        )  # fmt: skip


@triton.jit
def _down(
    x, a, scales, rows, tiles, work, x_row, inputs, parts, rank,
    ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """work [row, part] = scale * x A^T, of one tile, which may have no rows, and part."""
    tile, part = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    begin, stop = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if begin < stop:
        index = begin + tl.arange(0, ROWS)
        live = index < stop
        row = tl.load(rows + index, mask=live, other=0).to(tl.int64)
        place = slot * parts + part
        r = tl.arange(0, RANK)
        total = tl.zeros((ROWS, RANK), dtype=tl.float32)
        for start in range(0, inputs, BLOCK):
            k = start + tl.arange(0, BLOCK)
            inside = k < inputs
            values = tl.load(
                x + row[:, None] * x_row + k[None, :],
                mask=live[:, None] & inside[None, :],
                other=0.0,
            )
            weights = tl.load(
                a + (place * rank + r[None, :]) * inputs + k[:, None],
                mask=(r < rank)[None, :] & inside[:, None],
                other=0.0,
            )
            total = multiply(values, weights, total, IEEE)
        total *= tl.load(scales + place)
        tl.store(
            work + (index.to(tl.int64)[:, None] * parts + part) * rank + r[None, :],
            total,
            mask=live[:, None] & (r < rank)[None, :],
        )


@triton.jit
def _up(
    y, b, scales, rows, tiles, work, y_row, outputs, parts, rank, part, first, last,
    ROWS: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y += work B, of one tile and a block of one part's outputs."""
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile * 3).to(tl.int64)
    begin, stop = tl.load(tiles + tile * 3 + 1), tl.load(tiles + tile * 3 + 2)
    if tl.load(scales + slot * parts + part, mask=begin < stop, other=0.0) != 0.0:
        index = begin + tl.arange(0, ROWS)
        live = index < stop
        row = tl.load(rows + index, mask=live, other=0).to(tl.int64)
        column = first + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < last
        mask = live[:, None] & inside[None, :]
        at = y + row[:, None] * y_row + column[None, :]
        total = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        for start in range(0, RANK, 16):  # a product in float32 holds its operands in registers
            r = start + tl.arange(0, 16)
            down = tl.load(
                work + (index.to(tl.int64)[:, None] * parts + part) * rank + r[None, :],
                mask=live[:, None] & (r < rank)[None, :],
                other=0.0,
            )
            weights = tl.load(
                b + (slot * rank + r[:, None]) * outputs + column[None, :],
                mask=(r < rank)[:, None] & inside[None, :],
                other=0.0,
            ).to(tl.float32)
            total = multiply(down, weights, total, True)
        tl.store(at, narrow(total, y.dtype.element_ty), mask=mask)
