"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

WAIT = 1.0  # seconds that most calls wait for their answer


class Waiting(Protocol):
    """A call, as far as its end goes."""

    answered: bool

    def expire(self) -> None: ...


class Timeline:
    """Of two events at one time that comes first which was said first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        # Nearly all calls are answered, and most wait equally long: a queue of these is in order.
        self._waiting: deque[tuple[float, int, Waiting]] = deque()
        self._order = itertools.count()

    def later(self, delay: float, fn: Callable[..., None], *args: object) -> None:
        heapq.heappush(self._events, (self.now + delay, next(self._order), fn, args))

    def expire(self, call: Waiting, work: float) -> None:
        """Unless it is answered by then: a call that has so many seconds of work to do."""
        if work:
            self.later(WAIT + 10 * work, _expire, call)
        else:
            self._waiting.append((self.now + WAIT, next(self._order), call))

    def step(self, until: float = float("inf")) -> bool:
        """What comes next; False where nothing does before ``until``, or at it."""
        waiting, events = self._waiting, self._events
        while waiting and waiting[0][2].answered:
            waiting.popleft()
        if waiting and (not events or waiting[0][:2] < events[0][:2]):
            if waiting[0][0] > until:
                return False
            self.now, _, call = waiting.popleft()
            call.expire()
        elif events and events[0][0] <= until:
            self.now, _, fn, args = heapq.heappop(events)
            fn(*args)
        else:
            return False
        return True


def _expire(call: Waiting) -> None:
    if not call.answered:
        call.expire()
