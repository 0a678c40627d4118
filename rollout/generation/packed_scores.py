"""Logprobs of a prompt's tokens as arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedScores:
    """Of the tokens ``start <= i < start + T`` of a prompt: ``logprobs`` [T] float32, and of the k
    most likely ones ``top_ids`` [T, k] int32 and ``top_logprobs`` [T, k] float32, best first.
    """

    start: int
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedScores):
            return NotImplemented
        return self.start == other.start and all(
            a.dtype == b.dtype and np.array_equal(a, b)
            for a, b in zip(self.arrays, other.arrays, strict=True)
        )

    __hash__ = None  # type: ignore[assignment]

    @property
    def arrays(self) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        return self.logprobs, self.top_ids, self.top_logprobs

    def rows(self, token_ids: list[int]) -> list[dict[int, float] | None]:
        """``RequestOutput.prompt_logprobs``: None for tokens before ``start`` and for the first."""
        found: list[dict[int, float] | None] = [None] * self.start
        columns = (array.tolist() for array in self.arrays)
        for token, (own, ids, logprobs) in zip(
            token_ids[self.start :], zip(*columns, strict=True), strict=False
        ):
            row = dict(zip(ids, logprobs, strict=True))
            row.setdefault(token, own)
            found.append(row)
        return found
