"""The experts that a sequence's tokens were routed to, as far as steps have brought them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


class ExpertRows:
    """A row [layers with experts, experts of a token] for each position from ``start`` on.

    Positions come once, in their order: what is computed again after a preemption stays as it was
    when it gave its token. ``array`` may be called in any thread while the engine's appends.
    """

    def __init__(self, start: int = 0) -> None:
        self.start = self.stop = start
        self._rows: NDArray[Any] | None = None  # with room behind those that are there

    def append(self, rows: NDArray[Any]) -> None:
        """The next positions'."""
        count, more = self.stop - self.start, len(rows)
        old = self._rows
        if old is None or count + more > len(old):
            grown = np.empty((max(64, 2 * (count + more)), *rows.shape[1:]), rows.dtype)
            if old is not None:
                grown[:count] = old[:count]
            self._rows = old = grown
        old[count : count + more] = rows
        self.stop += more

    def array(self, stop: int) -> NDArray[Any] | None:
        """Of the positions before ``stop``, a copy; None where none has come yet."""
        rows = self._rows
        if rows is None:
            return None
        return rows[: max(0, min(stop, self.stop) - self.start)].copy()

    def take_prefix(self, other: ExpertRows, stop: int) -> None:
        """Be what ``other`` has of the positions before ``stop``."""
        rows = other.array(stop)
        if self._rows is None and rows is not None and other.start == self.start and len(rows):
            self.append(rows)
