"""Triton ``scan_logits``: one pass over the vocabulary, then one over the segments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, launch, power_of_2
from rollout.kernels.scan_logits import SEGMENT
from rollout.kernels.scan_logits import scan_logits as op

_TOGETHER = 4  # segments of one program


def scan_logits(
    logits: Tensor, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if logits.dtype not in FLOATS or logits.stride(1) != 1:
        return op.reference(logits, temperature)
    rows, vocab = logits.shape
    segments, device = triton.cdiv(vocab, SEGMENT), logits.device
    if temperature is not None:
        assert temperature.dtype == torch.float32, "temperatures are float32"
        assert temperature.shape == (rows,), f"{temperature.shape} for {rows} rows"
        temperature = temperature.contiguous()
    peaks = torch.empty(rows, segments, device=device)
    places = torch.empty(rows, segments, dtype=torch.int32, device=device)
    sums = torch.empty(rows, segments, device=device)
    best = torch.empty(rows, device=device)
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    mass = torch.empty(rows, dtype=torch.float64, device=device)
    launch(
        _scan,
        (rows, triton.cdiv(segments, _TOGETHER)),
        *(logits, best if temperature is None else temperature, peaks, places, sums),
        *(logits.stride(0), vocab, segments),
        WARM=temperature is not None,
        SEGMENT=SEGMENT,
        TOGETHER=_TOGETHER,
    )
    launch(
        _join,
        (rows,),
        *(peaks, places, sums, best, ids, mass, segments, vocab),
        BLOCK=power_of_2(segments),
    )
    return best, ids, sums, mass


@triton.jit
def _scan(
    logits,
    temperature,
    peaks,
    places,
    sums,
    stride,
    vocab,
    segments,
    WARM: tl.constexpr,
    SEGMENT: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Of each segment: its largest, the first place of it, and exponentials relative to it."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    inside = tl.arange(0, SEGMENT)
    at = segment[:, None] * SEGMENT + inside[None, :]
    values = tl.load(logits + row * stride + at, mask=at < vocab, other=float("-inf"))
    values = values.to(tl.float32)
    if WARM:
        values = values / tl.load(temperature + row)
    peak = tl.max(values, 1)
    place = tl.min(tl.where(values == peak[:, None], inside[None, :], SEGMENT), 1)
    anchor = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(values - anchor[:, None]), 1)
    to, live = row * segments + segment, segment < segments
    tl.store(peaks + to, peak, mask=live)
    tl.store(places + to, segment * SEGMENT + place, mask=live)
    tl.store(sums + to, total, mask=live)


@triton.jit
def _join(peaks, places, sums, best, ids, mass, segments, vocab, BLOCK: tl.constexpr):
    """The row's largest, and every segment's sum relative to it."""
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, BLOCK)
    live, at = segment < segments, row * segments + segment
    peak = tl.load(peaks + at, mask=live, other=float("-inf"))
    place = tl.load(places + at, mask=live, other=0)
    top = tl.max(peak, 0)
    first = tl.min(tl.where((peak == top) & live, place, vocab), 0)
    total = tl.load(sums + at, mask=live, other=0.0)
    factor = tl.where(peak == float("-inf"), 0.0, tl.exp(peak - top))
    factor = tl.where(total == total, factor, 1.0)  # a NaN stays one
    total = total * factor
    tl.store(sums + at, total, mask=live)
    tl.store(best + row, top)
    tl.store(ids + row, tl.minimum(first, vocab - 1).to(tl.int64))
    tl.store(mass + row, tl.sum(total.to(tl.float64), 0))
