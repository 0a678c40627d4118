"""The turn of one who reads the live weights: it gives way to an update that waits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from rollout.errors import UpdateInProgress

T = TypeVar("T")
GIVES_WAY = 2.0  # seconds that an update waits for who reads


class ReadLease:
    """Once it is ended, what is live may be overwritten: what was read since is of no use."""

    def __init__(self) -> None:
        self._ended = False

    def end(self) -> None:
        self._ended = True

    def check(self) -> None:
        """``UpdateInProgress`` where it is ended: call it behind each read."""
        if self._ended:
            raise UpdateInProgress(
                "an update waited for the weights that were read here, and goes first"
            )

    def pieces(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, which are read as they are asked for, as long as it lasts."""
        for item in items:
            self.check()
            yield item
