"""Triton ``sample``: one pass over the logits in memory, and no sort.

The first kernel leaves maximum and sums of exponentials of every segment. The second takes a row
each: without a filter it needs only those, and the one segment that the draw falls into. A filter's
threshold is found by bisection over the values' bits, which ascend with them; those passes, 17 for
bfloat16 logits, read a row that the first kernel has just brought into the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, launch, power_of_2
from rollout.kernels.sample import sample as op

SEGMENT = 512
_TOGETHER = 8  # segments that a program holds at once
_UNUSED = {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}  # low bits as float32


def sample(
    logits: Tensor, given: Tensor, numbers: Tensor, top_k: Tensor, draws: Tensor
) -> tuple[Tensor, Tensor]:
    if logits.dtype not in FLOATS or logits.stride(1) != 1:
        return op.reference(logits, given, numbers, top_k, draws)
    rows, vocab = logits.shape
    segments, device = triton.cdiv(vocab, SEGMENT), logits.device
    numbers = numbers.contiguous()
    parts = torch.empty(3, rows, segments, device=device)
    places = torch.empty(rows, segments, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    scores = torch.empty(rows, 3, device=device)
    chunks = triton.cdiv(segments, _TOGETHER)
    shape = {"SEGMENT": SEGMENT, "TOGETHER": _TOGETHER}
    launch(
        _scan,
        (rows, chunks),
        *(logits, numbers, parts, places, logits.stride(0), vocab, segments),
        **shape,
    )
    launch(
        _draw,
        (rows,),
        *(logits, given, numbers, top_k, draws, parts, places, tokens, scores),
        *(logits.stride(0), vocab, segments, chunks),
        BLOCK=power_of_2(segments),
        SHIFT=_UNUSED[logits.dtype],
        warps=8,
        **shape,
    )
    return tokens, scores


@triton.jit
def _scan(
    logits,
    numbers,
    parts,
    places,
    stride,
    vocab,
    segments,
    SEGMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Of each segment: the largest, its first place, and sums of exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    inside = tl.arange(0, SEGMENT)
    at = segment[:, None] * SEGMENT + inside[None, :]
    values = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
    values = values.to(tl.float32)
    heat = tl.load(numbers + row * 3)
    heat = tl.where(heat == 0.0, 1.0, heat)
    peak = tl.max(values, 1)
    place = tl.min(tl.where(values == peak[:, None], inside[None, :], SEGMENT), 1)
    below = values - tl.where(peak == float("-inf"), 0.0, peak)[:, None]
    to, live = row * segments + segment, segment < segments
    plane = tl.num_programs(0).to(tl.int64) * segments
    tl.store(parts + to, peak, mask=live)
    tl.store(parts + plane + to, tl.sum(tl.exp(below), 1), mask=live)
    tl.store(parts + 2 * plane + to, tl.sum(tl.exp(below / heat), 1), mask=live)
    tl.store(places + to, segment * SEGMENT + place, mask=live)


@triton.jit
def _draw(
    logits,
    given,
    numbers,
    top_k,
    draws,
    parts,
    places,
    tokens,
    scores,
    stride,
    vocab,
    segments,
    chunks,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """A row; ``edge`` is the least key that is kept, see ``_weights``."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    plane = tl.num_programs(0).to(tl.int64) * segments
    segment = tl.arange(0, BLOCK)
    live, at = segment < segments, row * segments + segment
    peak = tl.load(parts + at, mask=live, other=float("-inf"))
    place = tl.load(places + at, mask=live, other=0)
    top = tl.max(peak, 0)
    best = tl.min(tl.where((peak == top) & live, place, vocab), 0)
    gap = tl.where(live, peak - top, float("-inf"))
    sums = tl.load(parts + plane + at, mask=live, other=0.0) * tl.exp(gap)
    mass = tl.sum(sums.to(tl.float64), 0)
    heat = tl.load(numbers + row * 3)
    wanted = tl.load(given + row)
    drawing = (wanted < 0) & (heat != 0.0)
    token = tl.where(wanted < 0, tl.minimum(best, vocab - 1).to(tl.int64), wanted)
    heat = tl.where(heat == 0.0, 1.0, heat)
    warm_mass = mass
    kept = mass
    if drawing:
        scaled = parts + 2 * plane + at
        sums = tl.load(scaled, mask=live, other=0.0) * tl.exp(gap / heat)
        warm_mass = tl.sum(sums.to(tl.float64), 0)
        top_p = tl.load(numbers + row * 3 + 1)
        min_p = tl.load(numbers + row * 3 + 2)
        limit = tl.load(top_k + row)
        limited = (limit > 0) & (limit < vocab)
        edge = tl.full([], -(1 << 32), tl.int64)
        if limited | (top_p < 1.0) | (min_p > 0.0):
            if limited:
                edge = _edge(
                    logits, vocab, chunks, top, heat, min_p, edge, limit.to(tl.float64),
                    True, SHIFT, SEGMENT, TOGETHER,
                )  # fmt: skip
            if top_p < 1.0:
                whole = _above(
                    logits, vocab, chunks, top, heat, min_p, edge, edge - 1,
                    False, SHIFT, SEGMENT, TOGETHER,
                )  # fmt: skip
                edge = _edge(
                    logits, vocab, chunks, top, heat, min_p, edge, whole * top_p,
                    False, SHIFT, SEGMENT, TOGETHER,
                )  # fmt: skip
            tl.debug_barrier()  # what this program has read is overwritten
            for chunk in range(chunks):
                which = chunk * TOGETHER + tl.arange(0, TOGETHER)
                part = _weights(logits, vocab, which, top, heat, min_p, edge, SHIFT, SEGMENT)
                to = parts + 2 * plane + row * segments + which
                tl.store(to, tl.sum(part, 1), mask=which < segments)
            tl.debug_barrier()
            sums = tl.load(scaled, mask=live, other=0.0)
        exact = sums.to(tl.float64)
        kept = tl.sum(exact, 0)
        target = kept * tl.load(draws + row)
        found = _find(exact, segment, target)
        target -= tl.sum(tl.where(segment < found, exact, 0.0), 0)
        only = found + tl.arange(0, 1)
        inside = _weights(logits, vocab, only, top, heat, min_p, edge, SHIFT, SEGMENT)
        inside = tl.sum(inside, 0).to(tl.float64)  # one row
        token = found.to(tl.int64) * SEGMENT + _find(inside, tl.arange(0, SEGMENT), target)
    value = (tl.load(logits + token).to(tl.float32) - top).to(tl.float64)
    raw = value - tl.log(mass)
    log_kept = tl.where(drawing, tl.minimum(tl.log(kept) - tl.log(warm_mass), 0.0), 0.0)
    warm = value / heat - tl.log(warm_mass) - log_kept
    warm = tl.where(warm > 0.0, 0.0, warm)  # rounding; NaN stays
    processed = tl.where(drawing, warm, raw)
    tl.store(tokens + row, token)
    tl.store(scores + row * 3, raw.to(tl.float32))
    tl.store(scores + row * 3 + 1, processed.to(tl.float32))
    tl.store(scores + row * 3 + 2, log_kept.to(tl.float32))


@triton.jit
def _find(weights, index, target):
    """The place where the sum of float64 ``weights`` passes ``target``, of those not 0."""
    passed = tl.sum(tl.where(tl.cumsum(weights, 0) <= target, 1, 0), 0)
    return tl.minimum(passed, tl.max(tl.where(weights > 0.0, index, 0), 0))


@triton.jit
def _keys(values, SHIFT: tl.constexpr):
    """Integers that ascend with float32 ``values``; SHIFT: low bits that their dtype never uses."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _weights(
    logits, vocab, segment, top, heat, min_p, edge, SHIFT: tl.constexpr, SEGMENT: tl.constexpr
):
    """[segments, SEGMENT] of exp((logit - top) / heat), 0 for what a filter drops."""
    at = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    values = tl.load(logits + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
    weights = tl.exp((values - top) / heat)
    kept = (weights >= min_p) & (_keys(values, SHIFT) >= edge)
    return tl.where(kept, weights, 0.0)


@triton.jit
def _above(
    logits,
    vocab,
    chunks,
    top,
    heat,
    min_p,
    edge,
    cut,
    COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Mass (or number) of the kept tokens whose key is above ``cut``; float64."""
    total = tl.zeros([TOGETHER], tl.float64)
    floor = tl.maximum(edge, cut + 1)
    for chunk in range(chunks):
        segment = chunk * TOGETHER + tl.arange(0, TOGETHER)
        weights = _weights(logits, vocab, segment, top, heat, min_p, floor, SHIFT, SEGMENT)
        if COUNT:
            weights = tl.where(weights > 0.0, 1.0, 0.0)
        total += tl.sum(weights, 1).to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def _edge(
    logits,
    vocab,
    chunks,
    top,
    heat,
    min_p,
    edge,
    wanted,
    COUNT: tl.constexpr,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """The least key with less than ``wanted`` above it; at most the largest token's."""
    high = _keys(top, SHIFT).to(tl.int64)
    low = tl.full([], -(1 << (31 - SHIFT)) - 1, tl.int64)
    for _ in range(33 - SHIFT):
        middle = low + (high - low) // 2
        above = _above(
            logits, vocab, chunks, top, heat, min_p, edge, middle, COUNT, SHIFT, SEGMENT, TOGETHER
        )
        enough = above < wanted
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, middle)
    return high
