"""The logprobs of one prompt, as the steps bring them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rollout.engine.sampler_output import SamplerOutput
from rollout.generation import PackedScores

_Part = tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]


class ScoreBuilder:
    """Grows at its end only, so that a snapshot may read its first entries in any thread.

    ``start``: the first token that is scored; ``top``: how many alternatives each brings;
    ``is_nan``: whether a logprob is no number.
    """

    __slots__ = ("_parts", "is_nan", "length", "start", "top")

    def __init__(self, start: int, top: int) -> None:
        self.start, self.top, self.length = start, top, 0
        self.is_nan = False
        self._parts: list[_Part] = []

    def add(self, output: SamplerOutput, first: int, stop: int) -> None:
        """Take the rows ``first <= row < stop`` of a step."""
        raw = output.raw[first:stop].numpy().copy()
        count = min(self.top, output.top_ids.shape[1]) if output.top_ids.numel() else 0
        ids = output.top_ids[first:stop, :count].numpy() if count else None
        logprobs = output.top_logprobs[first:stop, :count].numpy() if count else None
        self._parts.append(
            (
                raw,
                np.empty((stop - first, 0), np.int32) if ids is None else ids.copy(),
                np.empty((stop - first, 0), np.float32) if logprobs is None else logprobs.copy(),
            )
        )
        self.length += stop - first
        self.is_nan = self.is_nan or bool(np.isnan(raw).any())

    def packed(self, length: int) -> PackedScores:
        """The first ``length`` entries."""
        none: _Part = (
            np.empty(0, np.float32),
            np.empty((0, self.top), np.int32),
            np.empty((0, self.top), np.float32),
        )
        columns = zip(*(self._parts or [none]), strict=True)
        logprobs, ids, top = (np.concatenate(column)[:length] for column in columns)
        return PackedScores(start=self.start, logprobs=logprobs, top_ids=ids, top_logprobs=top)
