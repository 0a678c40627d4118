"""Draws along the vocabulary by way of segments of fixed length: the same in any batch."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.scan_logits import SEGMENT


def draw_logits(
    logits: Tensor,
    temperature: Tensor | None,
    edges: Tensor | None,
    best: Tensor,
    sums: Tensor,
    draws: Tensor,
) -> Tensor:
    """Invert each row's cumulative sum, in vocabulary order, at ``draws`` in [0, 1): int64 [R].

    It is that of ``exp(x - best)``, ``x = logits / temperature``, over the x from ``edges`` [R] up;
    ``best`` and ``sums`` (here float64) as ``scan_logits`` or ``filter_logits`` gives them. A token
    of probability 0 is never drawn.
    """
    segment, target = _find_segment(sums, draws)
    inside, valid = _segments(logits, segment)
    inside = inside.float()
    if temperature is not None:
        inside = inside / temperature[:, None]
    if edges is not None:
        valid = valid & (inside >= edges[:, None])
    weights = (inside - best[:, None]).exp().double() * valid
    return _find_inside(weights, segment, target, logits.shape[1])


def _find_segment(sums: Tensor, draws: Tensor) -> tuple[Tensor, Tensor]:
    """The segment of each row that a draw falls into, and how far into it."""
    cumulative = sums.cumsum(-1)
    total = cumulative[:, -1]
    target = torch.minimum(draws * total, _below(total))
    segment = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    segment.clamp_(max=sums.shape[1] - 1)  # only rows of NaN reach it
    before = (cumulative - sums).gather(1, segment[:, None])[:, 0]
    return segment, target - before


def _find_inside(weights: Tensor, segment: Tensor, target: Tensor, vocab: int) -> Tensor:
    steps = weights.cumsum(-1)
    # The float32 sum of a segment and this float64 one differ in the last bits.
    target = torch.minimum(target.clamp_min(0.0), _below(steps[:, -1]))
    found = torch.searchsorted(steps, target[:, None], right=True)[:, 0]
    return (segment * SEGMENT + found).clamp_(max=vocab - 1)


def _segments(values: Tensor, segment: Tensor) -> tuple[Tensor, Tensor]:
    """One segment of each row [R, SEGMENT], past the end repeating the last; and which are real."""
    index = segment[:, None] * SEGMENT + torch.arange(SEGMENT, device=values.device)
    last = values.shape[1] - 1
    return values.gather(1, index.clamp(max=last)), index <= last


def _below(values: Tensor) -> Tensor:
    return values * (1.0 - 2.0**-53)
