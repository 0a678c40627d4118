"""What penalties read of a sequence."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class SeenTokens:
    """Each token of a sequence once, and how often its output has it.

    Kept while the sequence grows: counting thousands of tokens anew took longer than a step.
    ``prompt``: its tokens before the output.
    """

    def __init__(self, prompt: list[int]) -> None:
        ids = dict.fromkeys(prompt)
        self._places = {token: place for place, token in enumerate(ids)}
        self._ids = np.array([*ids], np.int64)
        self._counts = np.zeros(len(ids), np.float32)
        self._taken = len(prompt)

    def after(self, token_ids: list[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and counts, [n] each, valid until the next call; ``token_ids``: the sequence's,
        of which it has taken the first.
        """
        for token in token_ids[self._taken :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self._ids):
                self._ids = np.resize(self._ids, 2 * place)
                self._counts = np.concatenate([self._counts, np.zeros(place, np.float32)])
            self._ids[place] = token
            self._counts[place] += 1
        self._taken = len(token_ids)
        count = len(self._places)
        return self._ids[:count], self._counts[:count]
