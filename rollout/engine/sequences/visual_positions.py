"""Where images and videos lie in a prompt: for rotary positions, and the prefix cache's hashes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rollout.generation import PlacedVisual

_WORD = 7  # bytes of a digest that one placeholder stands for


class VisualPositions:
    """The images and videos of one prompt of ``length`` tokens, in the order of their places.

    Positions as Qwen-VL has them (mrope): a text's token has its place as time, row and column;
    parts of an image share the time of its beginning and have rows and columns from there; after
    it all three go on behind the largest row or column. Of a video that lies there whole the times
    rise by its pace, and are cut to integers.
    """

    def __init__(self, length: int, visuals: Sequence[PlacedVisual]) -> None:
        self.visuals = tuple(visuals)
        self._length, self._cache_ids = length, list[int]()
        self._table = np.empty((3, length), np.int64)
        place = at = 0
        for placed in visuals:
            self._text(at, placed.start, place)
            place += placed.start - at
            cells = np.indices(placed.visual.cells).reshape(3, -1)
            # In float32, as transformers multiplies: 3 x 0.7 must be cut as there.
            cells[0] = cells[0].astype(np.float32) * np.float32(placed.pace)
            self._table[:, placed.start : placed.stop] = cells + place
            place += max(placed.visual.cells[1:])
            at = placed.stop
        self._text(at, length, place)
        self._behind = place + length - at - length  # what to add to an index after the prompt

    @property
    def highest(self) -> int:
        """Of all positions of the prompt's tokens; times of a video may be above its length."""
        return int(self._table.max(initial=0))

    def of(self, start: int, stop: int) -> NDArray[np.int64]:
        """[3, stop - start]: of the prompt's tokens, and of those generated after it."""
        known = self._table[:, start:stop]
        later = np.arange(max(start, self._length), stop) + self._behind
        return np.concatenate((known, np.broadcast_to(later, (3, len(later)))), axis=1)

    def cache_ids(self, token_ids: Sequence[int]) -> list[int]:
        """The prompt's ids, ``token_ids``, as the prefix cache compares them; made once.

        A placeholder is a part of its visual's digest instead (negative, as no id is): equal ids of
        different ones never match, and four of them hold all of a digest but four bytes.
        """
        if self._cache_ids:
            return self._cache_ids
        ids = self._cache_ids = list(token_ids)
        for placed in self.visuals:
            digest, count = placed.digest, placed.visual.count
            words = [
                -1 - int.from_bytes(digest[at : at + _WORD], "little")
                for at in range(0, 4 * _WORD, _WORD)
            ]
            ids[placed.start : placed.stop] = (words * (count // 4 + 1))[:count]
        return ids

    def _text(self, start: int, stop: int, place: int) -> None:
        self._table[:, start:stop] = np.arange(stop - start) + place
