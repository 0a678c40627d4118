"""Reductions along the vocabulary in segments of fixed length: fast, and the same for any batch."""

from __future__ import annotations

import torch
from torch import Tensor

SEGMENT = 512


def argmax_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest value and its first position: float [R], int64 [R]."""
    vocab = values.shape[1]
    whole = vocab // SEGMENT
    peaks = []
    if whole:
        peaks.append(values[:, : whole * SEGMENT].view(-1, whole, SEGMENT).amax(-1))
    if vocab % SEGMENT:
        peaks.append(values[:, whole * SEGMENT :].amax(-1, keepdim=True))
    best, segment = torch.cat(peaks, 1).max(-1)
    inside, _ = _segments(values, segment)
    return best, segment * SEGMENT + inside.argmax(-1)


def segment_sums(probs: Tensor) -> Tensor:
    """Sums of consecutive segments: float64 [R, ceil(vocabulary / SEGMENT)]."""
    whole = probs.shape[1] // SEGMENT
    sums = []
    if whole:
        sums.append(probs[:, : whole * SEGMENT].view(-1, whole, SEGMENT).sum(-1))
    if probs.shape[1] % SEGMENT:
        sums.append(probs[:, whole * SEGMENT :].sum(-1, keepdim=True))
    return torch.cat(sums, 1).double()


def draw_rows(probs: Tensor, sums: Tensor, draws: Tensor) -> Tensor:
    """Invert each row's cumulative sum, in vocabulary order, at ``draws`` in [0, 1): int64 [R].

    ``probs`` need not sum to 1; ``sums`` are their ``segment_sums``. A token of probability 0 is
    never drawn.
    """
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(draws * total, _below(total))
    segment = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    segment.clamp_(max=sums.shape[1] - 1)  # only rows of NaN reach it
    before = (cumulative - sums).gather(1, segment[:, None])[:, 0]
    inside, valid = _segments(probs, segment)
    steps = (inside.double() * valid).cumsum(-1)
    # The float32 sum of a segment and this float64 one differ in the last bits.
    target = torch.minimum((target - before).clamp_min(0.0), _below(steps[:, -1]))
    found = torch.searchsorted(steps, target[:, None], right=True)[:, 0]
    return (segment * SEGMENT + found).clamp_(max=probs.shape[1] - 1)


def _segments(values: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """One segment of each row [R, SEGMENT], past the end repeating the last; and which are real."""
    index = segment[:, None] * SEGMENT + torch.arange(SEGMENT, device=values.device)
    last = values.shape[1] - 1
    return values.gather(1, index.clamp(max=last)), index <= last


def _below(values: Tensor) -> Tensor:
    return values * (1.0 - 2.0**-53)
