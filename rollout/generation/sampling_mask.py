"""Which tokens were left to draw from, at each token of an output."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class SamplingMask:
    """What top_p, top_k, min_p and masks kept, packed: ``token_ids`` of all tokens one after the
    other, each one's ascending, ``counts[i]`` of them for output token ``i``.

    A count of 0: the whole vocabulary was left, and none of it is listed.
    """

    counts: NDArray[np.int32]  # [tokens]
    token_ids: NDArray[np.int32]  # [sum of counts]

    @classmethod
    def of(cls, rows: Iterable[NDArray[np.int32]]) -> SamplingMask:
        """``rows``: the kept ids at each token, none where all were."""
        kept = list(rows)
        counts = np.array([len(row) for row in kept], np.int32)
        return cls(counts, np.concatenate([np.empty(0, np.int32), *kept]))

    def __len__(self) -> int:
        return len(self.counts)

    def rows(self) -> list[NDArray[np.int32]]:
        """The kept ids at each token."""
        return np.split(self.token_ids, np.cumsum(self.counts)[:-1]) if len(self) else []
