"""The least probability that top_p keeps: the most likely tokens until their mass is enough."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_SHIFT = 20  # of a float32's bits: 8 bins for each power of two


def nucleus_edges(probs: Tensor, top_p: Tensor) -> Tensor:
    """Edge of each row: a token is kept while the mass before it is below ``top_p`` of the row's.

    ``probs`` [R, vocabulary] float32, any scale; ``top_p`` [R] float64; returns [R, 1]. Sorts.
    """
    ordered = probs.sort(-1, descending=True).values
    through = ordered.double().cumsum(-1)
    wanted = through[:, -1:] * top_p[:, None]
    kept = (through - ordered < wanted).sum(-1, keepdim=True).clamp_min(1)
    return ordered.gather(1, kept - 1)


def nucleus_edge(probs: NDArray[np.float32], top_p: float) -> float:
    """The same for one row of a large vocabulary; only the bin that holds the edge is sorted.

    The bits of a non-negative float rise with its value, so their leading ones are its bin.
    """
    bins = probs.view(np.int32) >> _SHIFT
    if bins.min() < 0 or np.isnan(probs[0]):  # a row of NaN keeps everything
        return 0.0
    masses = np.bincount(bins, weights=probs)[::-1].cumsum()  # of a bin and all above it
    wanted = masses[-1] * top_p
    place = int(np.searchsorted(masses, wanted))
    above = masses[place - 1] if place else 0.0
    edge_bin = np.sort(probs[bins == len(masses) - 1 - place])[::-1]
    before = above + edge_bin.cumsum(dtype=np.float64) - edge_bin
    return float(edge_bin[max(1, int((before < wanted).sum())) - 1])
