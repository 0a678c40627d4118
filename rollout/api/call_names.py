"""The names of calls of several prompts, which have request ids of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


class CallNames:
    """Which requests are meant where a caller names a call. For one event loop."""

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {}

    @contextmanager
    def under_way(self, given: Any, ids: list[str]) -> Iterator[None]:
        """While the call runs, ``given`` means all of ``ids``, if it is one name for several."""
        named = isinstance(given, str) and len(ids) > 1 and given not in self._ids
        if named:
            self._ids[given] = ids
        try:
            yield
        finally:
            if named:
                del self._ids[given]

    def ids_of(self, names: Sequence[str]) -> list[str]:
        """These, which may be request ids, and those that they stand for."""
        return list(
            dict.fromkeys(one for name in names for one in (name, *self._ids.get(name, ())))
        )
