"""Triton ``digest``: strided boxes are read where they lie; one sum per program, then their sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.digest import EXPONENTS
from rollout.kernels.digest.strides import collapse, offsets, row_major
from rollout.kernels.gpu_launch import launch
from rollout.weights import Box, Shape

STEP = tl.constexpr(0x9E3779B97F4A7C15)
_BLOCK = 1024
_ROUNDS = 8  # blocks of one program, one after the other
_BITS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def digest(values: Tensor, shape: Shape, box: Box, nonfinite: list[int] | None = None) -> int:
    assert tuple(values.shape) == box.shape, f"values {values.shape} do not fill {box}"
    assert box.fits(shape), f"{box} is not inside {shape}"
    assert values.element_size() in _BITS, f"no digest of {values.dtype}"
    if not values.numel():
        return 0
    bits = values.detach().view(_BITS[values.element_size()])
    strides = row_major(shape)
    position = sum(a * s for a, s in zip(box.starts, strides, strict=True))
    *outer, rows, columns = collapse(list(zip(values.shape, values.stride(), strides, strict=True)))
    rounds = 1 if columns[0] <= _BLOCK else _ROUNDS
    chunks = triton.cdiv(columns[0], _BLOCK * rounds)
    exponent = 0 if nonfinite is None else EXPONENTS.get(values.dtype, 0)
    total = 0
    for memory, ahead in offsets(outer):
        size = (2 if exponent else 1, rows[0] * chunks)  # sums, and counts where there are some
        sums = torch.empty(size, dtype=torch.int64, device=values.device)
        launch(
            _digest,
            (rows[0] * chunks,),
            *(bits, sums, memory, position + ahead, chunks),
            *(columns[0], rows[1], columns[1], rows[2]),
            BLOCK=_BLOCK,
            ROUNDS=rounds,
            EXPONENT=exponent,
        )
        total += int(sums[0].sum())
        if nonfinite is not None and exponent:
            nonfinite[0] += int(sums[1].sum())
    return total % 2**64


@triton.jit
def mixed(x):
    """``x`` plus the product of its halves, of which hardware makes one instruction."""
    return x.to(tl.uint32).to(tl.uint64) * (x >> 32).to(tl.uint32).to(tl.uint64) + x


@triton.jit
def _digest(
    bits,
    sums,
    memory,
    position,
    chunks,
    columns,
    row_stride,
    column_stride,
    row_positions,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
    EXPONENT: tl.constexpr,
):
    """A row of the box and a chunk of its columns, whose positions are consecutive."""
    program = tl.program_id(0).to(tl.int64)
    row, first = program // chunks, program % chunks * (BLOCK * ROUNDS)
    bits += memory + row * row_stride
    position += row * row_positions + 1
    total = tl.zeros([BLOCK], tl.uint64)
    found = tl.zeros([BLOCK], tl.int32)
    for step in range(ROUNDS):
        column = first + step * BLOCK + tl.arange(0, BLOCK).to(tl.int64)
        value = tl.load(bits + column * column_stride, mask=column < columns, other=0)
        x = (position + column).to(tl.uint64) * STEP + value.to(tl.uint64)
        x = mixed(mixed(x))
        total += tl.where(column < columns, x, 0)
        if EXPONENT != 0:
            found += ((value.to(tl.uint64) & EXPONENT) == EXPONENT).to(tl.int32)
    tl.store(sums + program, tl.sum(total, 0).to(tl.int64, bitcast=True))
    if EXPONENT != 0:
        tl.store(sums + tl.num_programs(0) + program, tl.sum(found, 0).to(tl.int64))
