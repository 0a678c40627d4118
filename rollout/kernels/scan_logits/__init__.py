"""What sampling needs of a row of logits: its largest, and sums of exponentials by segment."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.op import op

SEGMENT = 512
_AT_ONCE = 4 << 20  # elements that the reference widens at a time


@op
def scan_logits(
    logits: Tensor, temperature: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """``(best, best_ids, sums, mass)`` of every row of ``x = logits / temperature``.

    logits: [R, V], V > 0; temperature: [R] float32 or None for 1. best [R] float32 is the row's
    maximum and best_ids [R] int64 its first position. sums [R, ceil(V / SEGMENT)] float32 are those
    of ``exp(x - best)`` over consecutive segments, and mass [R] float64 their sum, in that order.
    Each row is computed by itself; one with a NaN has a mass of NaN.
    """
    rows, vocab = logits.shape
    step = max(1, _AT_ONCE // vocab)
    parts = []
    for start in range(0, max(rows, 1), step):
        x = logits[start : start + step]
        x = x if x.dtype == torch.float64 else x.float()
        if temperature is not None:
            x = x / temperature[start : start + step, None]
        parts.append(_scan(x))
    best, ids, sums, mass = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return best, ids, sums, mass


def _scan(x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    vocab = x.shape[1]
    padding = -vocab % SEGMENT
    x = torch.nn.functional.pad(x, (0, padding), value=float("-inf"))
    segments = x.view(len(x), x.shape[1] // SEGMENT, SEGMENT)
    best, segment = segments.amax(-1).max(-1)
    inside = segments[torch.arange(len(x), device=x.device), segment].argmax(-1)
    sums = (segments - best[:, None, None]).exp().sum(-1)
    ids = (segment * SEGMENT + inside).clamp_(max=vocab - 1)
    return best, ids, sums, sums.double().cumsum(-1)[:, -1]
