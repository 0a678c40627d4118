"""Launching Triton kernels, and the arithmetic they share.

Every kernel computes in float32: bfloat16 arithmetic of the interpreter is wrong, and its cast
from float32 cuts digits off instead of rounding. ``narrow`` rounds as the hardware does in both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from rollout.kernels.gpu_support import interpreted, overlaps

#: dtypes that the kernels are made for; others run the reference
FLOATS = (torch.float32, torch.bfloat16, torch.float16)

#: Triton's types: of bits by their bytes, and of what is computed with
BITS = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32, 8: tl.uint64}
FLOAT_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_HELD = 4096  # elements of a state that one program keeps in registers

INTERPRETED = tl.constexpr(interpreted())

_cuda: Any = getattr(tl.extra, "cuda", None)
_gdc_launch_dependents: Any = getattr(_cuda, "gdc_launch_dependents", None)
_gdc_wait: Any = getattr(_cuda, "gdc_wait", None)


@dataclass(frozen=True)
class Launch:
    """One launch as it was asked for: what ahead-of-time compilation needs of it."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int
    stages: int
    contract: bool


_records: list[Launch] | None = None


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Launches are written down instead of run; for tests, one thread at a time."""
    global _records
    _records = []
    try:
        yield _records
    finally:
        _records = None


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    overlap: bool | None = None,
    contract: bool = True,
    **constants: Any,
) -> None:
    """Run ``kernel`` over ``grid``; an empty grid runs nothing. ``constants`` are ``constexpr``.

    On the device of the first tensor, which need not be the current one. ``overlap``, of a kernel
    that takes OVERLAP and begins with ``await_kernel_before``: whether it is launched while the
    kernel before it still runs, where the device can (``few_tokens``). ``contract`` False: every
    product is rounded before it is added to, as the kernel says; else the compiler may pass over a
    rounding to 16 bits in between.
    """
    device = arguments[0].device
    if overlap is not None:
        able = overlap and (_records is not None or overlaps(device))
        constants["OVERLAP"] = able and _gdc_wait is not None
    if _records is not None:
        _records.append(Launch(kernel, arguments, constants, warps, stages, contract))
        return
    if 0 in grid:
        return
    run = kernel[grid]
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": contract}
    if constants.get("OVERLAP"):
        options["launch_pdl"] = True
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            run(*arguments, **constants, **options)
    else:
        run(*arguments, **constants, **options)


def few_tokens(tokens: int) -> bool:
    """Whether kernels of a step of so many leave room for the next ones beside them.

    On an H200 overlapping steps of one sequence took 0.85 to 0.95 of the time, steps of 32 0.91
    (1 B parameters) and 1.02 (8 B), of 256 1.02 to 1.05.
    """
    return tokens <= 32


def as_words(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Dense tensors as int64 of the same memory where their rows have whole ones, else as bytes;
    all alike.
    """
    held = [part.view(torch.uint8) for part in parts]
    whole = all(part.shape[-1] % 8 == 0 and part.data_ptr() % 8 == 0 for part in held)
    return [part.view(torch.int64) for part in held] if whole else held


def power_of_2(n: int) -> int:
    """The next power of two; Triton's blocks have such sizes."""
    return int(triton.next_power_of_2(max(1, n)))


def held_columns(rows: int, columns: int) -> int:
    """How many columns of a state of ``rows``, a power of two, one program keeps in registers."""
    return max(1, min(power_of_2(columns), _HELD // rows))


@triton.jit
def await_kernel_before(overlap: tl.constexpr):
    """Before this no program may touch the device's memory: the kernel before may still write it,
    or read what this one writes. The next kernel may be launched from here on, and waits likewise.
    """
    if overlap:
        _gdc_launch_dependents()
        _gdc_wait()


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """float32 rounded to ``dtype``, to the nearest and to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 with the digits of ``dtype``."""
    return narrow(x, dtype).to(tl.float32)


@triton.jit
def silu(x):
    """x / (1 + exp(-x)); the exponential never overflows."""
    small = tl.exp(-tl.abs(x))
    return x * tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def multiply(a, b, total, ieee: tl.constexpr):
    """``total + a @ b`` in float32; widened first where the interpreter runs."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    if ieee or INTERPRETED:
        return tl.dot(a, b, total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def sequence_of(tile, query_starts, sequences, queries: tl.constexpr):
    """The last sequence whose first tile is not behind ``tile``.

    With one query per tile, a tile is a row; else sequence s begins at tile
    ``query_starts[s] // queries + s``, which leaves room for its last, partial tile.
    """
    low = sequences * 0
    high = sequences - 1
    if queries == 1:
        # In a batch of decodes row s is sequence s.
        guess = tl.minimum(tile, high)
        if (tl.load(query_starts + guess) <= tile) & (tl.load(query_starts + guess + 1) > tile):
            low = guess
            high = guess
    while low < high:
        middle = (low + high + 1) // 2
        begin = tl.load(query_starts + middle)
        if queries > 1:
            begin = begin // queries + middle
        if begin <= tile:
            low = middle
        else:
            high = middle - 1
    return low
