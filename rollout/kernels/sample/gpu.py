"""Triton ``sample``: one pass over the logits in memory, and no sort.

The first kernel leaves maximum and sums of exponentials of every segment. The last takes a row
each: it needs only those, and the one segment that the draw falls into. What filters drop is found
between the two, by launches that read logits which the first has just brought into the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, launch, power_of_2
from rollout.kernels.sample import sample as op
from rollout.kernels.sample.gpu_filters import (
    NO_EDGE,
    SEGMENT,
    TOGETHER,
    UNUSED,
    Kept,
    keep,
    load_values,
    weigh,
)


def sample(
    logits: Tensor,
    given: Tensor,
    numbers: Tensor,
    top_k: Tensor,
    draws: Tensor,
    filtered: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    if logits.dtype not in FLOATS or logits.stride(1) != 1:
        return op.reference(logits, given, numbers, top_k, draws)
    rows, vocab = logits.shape
    segments, device = triton.cdiv(vocab, SEGMENT), logits.device
    numbers = numbers.contiguous()
    parts = torch.empty(3, rows, segments, device=device)
    places = torch.empty(rows, segments, dtype=torch.int32, device=device)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    scores = torch.empty(rows, 3, device=device)
    least = torch.empty(rows, device=device)
    launch(
        _scan,
        (rows, triton.cdiv(segments, TOGETHER)),
        *(logits, numbers, parts, places, logits.stride(0), vocab, segments),
        SEGMENT=SEGMENT,
        TOGETHER=TOGETHER,
    )
    kept = Kept(places, parts, parts)  # not read
    if filtered:
        kept = keep(logits, parts[0], given, numbers, top_k)
    launch(
        _draw,
        (rows,),
        *(logits, given, numbers, top_k, draws, parts, places, kept.edges, kept.sums, kept.least),
        *(tokens, scores, least, logits.stride(0), vocab, segments),
        FILTERED=filtered,
        BLOCK=power_of_2(segments),
        SHIFT=UNUSED[logits.dtype],
        SEGMENT=SEGMENT,
        warps=8,
    )
    return tokens, scores, least


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
    edges,
    kept_sums,
    kept_least,
    tokens,
    scores,
    least,
    stride,
    vocab,
    segments,
    FILTERED: tl.constexpr,
    BLOCK: tl.constexpr,
    SHIFT: tl.constexpr,
    SEGMENT: tl.constexpr,
):
    """A row."""
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
    bottom = tl.full([], float("-inf"), tl.float32)
    if drawing:
        sums = tl.load(parts + 2 * plane + at, mask=live, other=0.0) * tl.exp(gap / heat)
        warm_mass = tl.sum(sums.to(tl.float64), 0)
        min_p = tl.load(numbers + row * 3 + 2)
        edge = tl.full([], NO_EDGE, tl.int64)
        if FILTERED:
            top_p = tl.load(numbers + row * 3 + 1)
            limit = tl.load(top_k + row)
            limited = (limit > 0) & (limit < vocab)
            if limited | (top_p < 1.0) | (min_p > 0.0):
                edge = tl.load(edges + row)
                sums = tl.load(kept_sums + at, mask=live, other=0.0)
                bottoms = tl.load(kept_least + at, mask=live, other=float("inf"))
                bottom = tl.min(bottoms, 0)
        exact = sums.to(tl.float64)
        kept = tl.sum(exact, 0)
        target = kept * tl.load(draws + row)
        found = _find(exact, segment, target)
        target -= tl.sum(tl.where(segment < found, exact, 0.0), 0)
        values = load_values(logits, vocab, found + tl.arange(0, 1), SEGMENT)
        inside = weigh(values, top, heat, min_p, edge, SHIFT)
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
    tl.store(least + row, bottom)


@triton.jit
def _find(weights, index, target):
    """The place where the sum of float64 ``weights`` passes ``target``, of those not 0."""
    passed = tl.sum(tl.where(tl.cumsum(weights, 0) <= target, 1, 0), 0)
    return tl.minimum(passed, tl.max(tl.where(weights > 0.0, index, 0), 0))
