"""The filters of ``sample`` in Triton: the least logit that a row keeps, without a sort.

The bits of floats, read as integers, ascend with them. So a threshold is searched among those
integers: every launch sums up what lies above a few cuts of the range that is left, by many
programs a row, and the next one goes on with the part in which the threshold lies. The first search
is that of top_k, by number, the second that of top_p, by mass. A row ends up with the same bits
for any number of cuts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import launch, power_of_2

SEGMENT = 512
TOGETHER = 8  # segments that a program holds at once
UNUSED = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits as float32
_FEW_ROWS = 32  # launches bound them: more cuts, fewer launches
_LEAST = -2139095041  # what the bits of -inf are read as
NO_EDGE = tl.constexpr(-(1 << 32))


@dataclass(frozen=True, slots=True)
class Kept:
    """What filters leave: ``edges`` [R] int64, the least key kept; and of each segment [R,
    segments] ``sums`` of ``exp((logit - largest) / temperature)`` and the ``least`` logit, infinity
    where there is none; of rows that have a filter.
    """

    edges: Tensor
    sums: Tensor
    least: Tensor


def keep(logits: Tensor, peaks: Tensor, given: Tensor, numbers: Tensor, top_k: Tensor) -> Kept:
    """``peaks``: [R, segments] float32, the largest of each segment; the rest as in ``sample``."""
    rows, segments = peaks.shape
    vocab, device = logits.shape[1], logits.device
    chunks, shift = triton.cdiv(segments, TOGETHER), UNUSED[logits.dtype]
    ways = 16 if rows <= _FEW_ROWS else 4
    stages = _stages(shift, ways)
    sums = torch.empty(2 * stages, rows, chunks, ways, device=device)
    bounds = torch.empty(2 * stages, rows, 2, dtype=torch.int64, device=device)
    edges = torch.empty(2, rows, dtype=torch.int64, device=device)
    kept = torch.empty(2, rows, segments, device=device)
    arguments = (logits, peaks, given, numbers, top_k, sums, bounds, edges, kept)
    shape: dict[str, Any] = {
        "LEAST": _LEAST >> shift,
        "STAGES": stages,
        "WAYS": ways,
        "BLOCK": power_of_2(segments),
        "CHUNKS": power_of_2(chunks),
        "SHIFT": shift,
        "SEGMENT": SEGMENT,
        "TOGETHER": TOGETHER,
    }
    for stage in range(2 * stages):
        launch(
            _narrow,
            (rows, chunks),
            *(*arguments, logits.stride(0), vocab, segments, stage),
            BY_NUMBER=stage < stages,
            **shape,
        )
    launch(_sum_up, (rows, chunks), *(*arguments, logits.stride(0), vocab, segments), **shape)
    return Kept(edges[1], *kept)


def _stages(shift: int, ways: int) -> int:
    """After how many of them one key is left of all that there are."""
    left, stages = (0x7F800000 >> shift) - (_LEAST >> shift), 0
    while left > 1:
        left, stages = triton.cdiv(left, ways), stages + 1
    return stages


@triton.jit
def keys_of(values, SHIFT: tl.constexpr):
    """Integers that ascend with float32 ``values``; SHIFT: low bits that their dtype never uses."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def load_values(logits, vocab, segment, SEGMENT: tl.constexpr):
    """float32 [segments, SEGMENT] of a row."""
    at = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    return tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)


@triton.jit
def weigh(values, top, heat, min_p, edge, SHIFT: tl.constexpr):
    """exp((value - top) / heat), 0 for what a filter drops."""
    weights = tl.exp((values - top) / heat)
    return tl.where(_left(values, weights, min_p, edge, SHIFT), weights, 0.0)


@triton.jit
def _left(values, weights, min_p, edge, SHIFT: tl.constexpr):
    """Whether no filter drops it."""
    return (weights >= min_p) & (keys_of(values, SHIFT) >= edge)


@triton.jit(do_not_specialize=["stage"])
def _narrow(
    logits,
    peaks,
    given,
    numbers,
    top_k,
    sums,
    bounds,
    edges,
    kept,
    stride,
    vocab,
    segments,
    stage,
    BY_NUMBER: tl.constexpr,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Number or mass above each cut, of one chunk of a row that has this filter."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(numbers + row * 3)
    top_p = tl.load(numbers + row * 3 + 1)
    limit = tl.load(top_k + row)
    limited = (limit > 0) & (limit < vocab)
    wanted = limited if BY_NUMBER else top_p < 1.0
    if wanted & (heat != 0.0) & (tl.load(given + row) < 0):
        top = _largest(peaks, row, segments, BLOCK)
        edge = tl.full([], NO_EDGE, tl.int64)
        if not BY_NUMBER:
            if stage > STAGES:
                edge = tl.load(edges + row)
            elif limited:
                edge = _edge(sums, bounds, row, STAGES, limit.to(tl.float64), WAYS, CHUNKS)
        low = tl.full([], LEAST, tl.int64)
        high = keys_of(top, SHIFT).to(tl.int64)
        if (stage != 0) & (stage != STAGES):
            number = limit.to(tl.float64)
            if not BY_NUMBER:
                number = _whole(sums, row, STAGES, WAYS, CHUNKS) * top_p
            low, high = _part(sums, bounds, row, stage, number, WAYS, CHUNKS)
        if chunk == 0:
            place = bounds + (stage * tl.num_programs(0).to(tl.int64) + row) * 2
            tl.store(place, low)
            tl.store(place + 1, high)
            if stage == STAGES:
                tl.store(edges + row, edge)
        segment = chunk * TOGETHER + tl.arange(0, TOGETHER)
        values = load_values(logits + row * stride, vocab, segment, SEGMENT)
        min_p = tl.load(numbers + row * 3 + 2)
        weights = tl.exp((values - top) / heat)
        left = _left(values, weights, min_p, edge, SHIFT)
        if BY_NUMBER:  # weights of what is far below the largest are 0, and it counts
            weights = tl.where(left & (values > float("-inf")), 1.0, 0.0)
        else:
            weights = tl.where(left, weights, 0.0)
        keys = keys_of(values, SHIFT)
        to = sums + _place(row, stage, chunk, WAYS)
        for way in tl.static_range(WAYS):
            cut = low + (high - low) * (way + 1) // WAYS
            if way == WAYS - 1:
                above = weights  # all of it
            else:
                above = tl.where(keys > cut.to(tl.int32), weights, 0.0)
            tl.store(to + way, tl.sum(tl.sum(above, 1), 0))


@triton.jit
def _sum_up(
    logits,
    peaks,
    given,
    numbers,
    top_k,
    sums,
    bounds,
    edges,
    kept,
    stride,
    vocab,
    segments,
    LEAST: tl.constexpr,
    STAGES: tl.constexpr,
    WAYS: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """What is left of each segment of a chunk, and the edge behind all searches."""
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heat = tl.load(numbers + row * 3)
    top_p = tl.load(numbers + row * 3 + 1)
    min_p = tl.load(numbers + row * 3 + 2)
    limit = tl.load(top_k + row)
    limited = (limit > 0) & (limit < vocab)
    filtered = limited | (top_p < 1.0) | (min_p > 0.0)
    if filtered & (heat != 0.0) & (tl.load(given + row) < 0):
        top = _largest(peaks, row, segments, BLOCK)
        edge = tl.full([], NO_EDGE, tl.int64)
        if limited:
            edge = _edge(sums, bounds, row, STAGES, limit.to(tl.float64), WAYS, CHUNKS)
        if top_p < 1.0:
            mass = _whole(sums, row, STAGES, WAYS, CHUNKS) * top_p
            last = _edge(sums, bounds, row, 2 * STAGES, mass, WAYS, CHUNKS)
            edge = tl.maximum(edge, last)
        if chunk == 0:
            tl.store(edges + tl.num_programs(0).to(tl.int64) + row, edge)
        segment = chunk * TOGETHER + tl.arange(0, TOGETHER)
        values = load_values(logits + row * stride, vocab, segment, SEGMENT)
        weights = tl.exp((values - top) / heat)
        left = _left(values, weights, min_p, edge, SHIFT)
        to, live = kept + row * segments + segment, segment < segments
        tl.store(to, tl.sum(tl.where(left, weights, 0.0), 1), mask=live)
        at = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
        least = tl.min(tl.where(left & (at < vocab), values, float("inf")), 1)
        tl.store(to + tl.num_programs(0).to(tl.int64) * segments, least, mask=live)


@triton.jit
def _largest(peaks, row, segments, BLOCK: tl.constexpr):
    segment = tl.arange(0, BLOCK)
    at = peaks + row * segments + segment
    return tl.max(tl.load(at, mask=segment < segments, other=float("-inf")), 0)


@triton.jit
def _place(row, stage, chunk, WAYS: tl.constexpr):
    """Of the first sum of a chunk."""
    rows, chunks = tl.num_programs(0).to(tl.int64), tl.num_programs(1)
    return ((stage * rows + row) * chunks + chunk) * WAYS


@triton.jit
def _totals(sums, row, stage, WAYS: tl.constexpr, CHUNKS: tl.constexpr):
    """float64 [WAYS]: those of all chunks."""
    chunk, way = tl.arange(0, CHUNKS), tl.arange(0, WAYS)
    at = _place(row, stage, chunk[:, None], WAYS) + way[None, :]
    found = tl.load(sums + at, mask=(chunk < tl.num_programs(1))[:, None], other=0.0)
    return tl.sum(found.to(tl.float64), 0)


@triton.jit
def _whole(sums, row, STAGES: tl.constexpr, WAYS: tl.constexpr, CHUNKS: tl.constexpr):
    """The mass that top_p is a part of: all that top_k left."""
    way = tl.arange(0, WAYS)
    return tl.sum(tl.where(way == WAYS - 1, _totals(sums, row, STAGES, WAYS, CHUNKS), 0.0), 0)


@triton.jit
def _part(sums, bounds, row, stage, wanted, WAYS: tl.constexpr, CHUNKS: tl.constexpr):
    """Between which of the cuts of the stage before the edge lies."""
    place = bounds + ((stage - 1) * tl.num_programs(0).to(tl.int64) + row) * 2
    low, high = tl.load(place), tl.load(place + 1)
    way = tl.arange(0, WAYS)
    totals = _totals(sums, row, stage - 1, WAYS, CHUNKS)
    short = tl.sum(tl.where((totals >= wanted) & (way < WAYS - 1), 1, 0), 0).to(tl.int64)
    return low + (high - low) * short // WAYS, low + (high - low) * (short + 1) // WAYS


@triton.jit
def _edge(sums, bounds, row, stage, wanted, WAYS: tl.constexpr, CHUNKS: tl.constexpr):
    """The least key with less than ``wanted`` above it; at most the largest token's."""
    _, high = _part(sums, bounds, row, stage, wanted, WAYS, CHUNKS)
    return high
