"""Times of named parts of a program, measured by standing in their place."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class SpanTotal:
    """Seconds inside one span, those of spans within it apart, and how often it was entered."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(slots=True)
class Spans:
    """Times of named functions of one thread, by where they were called from.

    ``totals["step/forward/linear"]``: own seconds of "linear" inside "forward" inside "step"; the
    own seconds of a path and of all below it add up to what it took. Calls on other threads than
    ``thread`` (an id; 0 is none) run unmeasured. ``wait``: called before every look at the clock,
    for devices that run behind.
    """

    wait: Callable[[], Any] | None = None
    thread: int = 0
    totals: dict[str, SpanTotal] = field(default_factory=dict)
    _path: str = ""
    _inside: float = 0.0  # seconds of the spans that ended within the present one

    def timed(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        """``run``, measured as the span ``name``."""

        def measured(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self.thread:
                return run(*args, **kwargs)
            outer, before = self._path, self._inside
            path = self._path = f"{outer}/{name}" if outer else name
            self._inside = 0.0
            started = self._now()
            try:
                return run(*args, **kwargs)
            finally:
                seconds = self._now() - started
                total = self.totals.setdefault(path, SpanTotal())
                total.seconds += seconds - self._inside
                total.calls += 1
                self._path, self._inside = outer, before + seconds

        return measured

    def take(self) -> dict[str, SpanTotal]:
        """What was measured since the last call."""
        totals, self.totals = self.totals, {}
        return totals

    def _now(self) -> float:
        if self.wait is not None:
            self.wait()
        return time.perf_counter()


class Watched:
    """Attributes of objects replaced by measured ones, until ``close`` puts back what was there."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """``owner.name`` becomes ``make(owner.name)``; an inherited attribute is found again."""
        own = vars(owner).get(name)
        setattr(owner, name, make(getattr(owner, name)))
        if own is None:
            self._undo.append(lambda: delattr(owner, name))
        else:
            self._undo.append(lambda: setattr(owner, name, own))

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()
