"""What penalties read of a sequence."""

from __future__ import annotations

from array import array
from itertools import islice

import numpy as np
from numpy.typing import NDArray


class SeenTokens:
    """Each token of a sequence once, and how often its output has it.

    Kept while the sequence grows: counting thousands of tokens anew took longer than a step.
    ``prompt``: its tokens before the output.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._ids = array("q", dict.fromkeys(prompt))
        self._counts = array("f", [0.0]) * len(self._ids)
        self._places = {token: place for place, token in enumerate(self._ids)}
        self._taken = len(prompt)

    def after(self, token_ids: list[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Tokens and counts, [n] each; ``token_ids``: the sequence's, of which it had the first."""
        for token in islice(token_ids, self._taken, None):
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0.0)
            self._counts[place] += 1
        self._taken = len(token_ids)
        return np.array(self._ids), np.array(self._counts)
