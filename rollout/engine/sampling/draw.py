"""Draws along the vocabulary by way of segments of fixed length: the same in any batch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
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


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniforms(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, position), both int64 [n].

    Two rounds of splitmix64's finaliser (Steele, Lea, Flood 2014): one spreads the seed, one the
    position counted from there, so neighbouring seeds and positions give unrelated numbers.
    """
    with np.errstate(over="ignore"):  # arithmetic is modulo 2^64
        state = _mix(seeds.astype(np.uint64) + _GOLDEN)
        state = _mix(state + _GOLDEN * (positions.astype(np.uint64) + np.uint64(1)))
    bits: NDArray[np.float64] = (state >> np.uint64(11)).astype(np.float64)
    return bits * 2.0**-53


def _mix(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out: NDArray[np.uint64] = z ^ (z >> np.uint64(31))
    return out
