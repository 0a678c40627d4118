"""What min_p, top_k and top_p keep of a row of logits: everything from one edge up."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.op import op
from rollout.kernels.scan_logits import SEGMENT

_AT_ONCE = 4 << 20  # elements that the reference widens at a time


@op
def filter_logits(
    logits: Tensor,
    temperature: Tensor | None,
    best: Tensor,
    sums: Tensor,
    mass: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """(edges, sums, mass): the least ``x = logits / temperature`` kept, and ``scan_logits`` of it.

    ``best``, ``sums`` and ``mass`` are what ``scan_logits(logits, temperature)`` gave. In turn:
    min_p [R] float32 keeps what is at least that likely relative to the best (0: off); top_k [R]
    int64 the k largest (0: off); top_p [R] float64 the most likely of what is left while the mass
    before them is below that share of it (1: off). Ties with the last one kept are kept with it.
    edges [R] float32; a row without a filter, or with a NaN, keeps everything: minus infinity.
    """
    step = max(1, _AT_ONCE // logits.shape[1])
    parts = []
    for start in range(0, max(len(logits), 1), step):
        rows = slice(start, start + step)
        x = logits[rows].float()
        if temperature is not None:
            x = x / temperature[rows, None]
        settings = (top_k[rows], top_p[rows], min_p[rows])
        parts.append(_filter(x, best[rows], sums[rows], mass[rows], *settings))
    edges, kept, masses = (torch.cat(columns) for columns in zip(*parts, strict=True))
    return edges, kept, masses


def _filter(
    x: Tensor,
    best: Tensor,
    sums: Tensor,
    mass: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    vocab = x.shape[1]
    off = torch.full_like(best, float("-inf"))
    edges = torch.where(min_p > 0, (best.double() + min_p.double().log()).float(), off)
    limited = (top_k > 0) & (top_k < vocab)
    if limited.any():
        largest = x.topk(int(top_k[limited].max()), dim=-1).values
        last = largest.gather(1, (top_k - 1).clamp(0, largest.shape[1] - 1)[:, None])[:, 0]
        edges = torch.where(limited, torch.maximum(edges, last), edges)
    if (top_p < 1).any():
        weights = (x - best[:, None]).exp().masked_fill(x < edges[:, None], 0.0)
        edges = torch.where(top_p < 1, _nucleus(x, weights, top_p), edges)
    filtered = (limited | (top_p < 1) | (min_p > 0)) & ~mass.isnan()
    edges = torch.where(filtered, edges, off)
    weights = (x - best[:, None]).exp().masked_fill(x < edges[:, None], 0.0)
    padded = torch.nn.functional.pad(weights, (0, -vocab % SEGMENT))
    kept = padded.view(len(x), padded.shape[1] // SEGMENT, SEGMENT).sum(-1)
    total = kept.double().cumsum(-1)[:, -1]
    return (
        edges,
        torch.where(filtered[:, None], kept.to(sums.dtype), sums),
        torch.where(filtered, total, mass),
    )


def _nucleus(x: Tensor, weights: Tensor, top_p: Tensor) -> Tensor:
    """The least x of each row [R] whose mass before it, from the largest down, is not enough."""
    ordered, order = x.sort(dim=-1, descending=True)
    masses = weights.gather(1, order).double()
    through = masses.cumsum(-1)
    wanted = through[:, -1:] * top_p[:, None]
    kept = (through - masses < wanted).sum(-1, keepdim=True).clamp_min(1)
    return ordered.gather(1, kept - 1)[:, 0]
