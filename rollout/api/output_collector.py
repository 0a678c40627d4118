"""From the engine's thread to one reader in an event loop."""

from __future__ import annotations

import asyncio
from collections import deque

from rollout.distributed.wakeup import Wakeup
from rollout.engine.requests.request_state import Snapshot


class Mailbox:
    """Of the loop that made it, for what other threads bring its collectors: it is woken once for
    all that comes until it looks, as from a step of many streams.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._items: deque[tuple[RequestOutputCollector, Snapshot | BaseException]] = deque()
        self._is_woken = False

    def put(self, collector: RequestOutputCollector, item: Snapshot | BaseException) -> None:
        """From any thread; never blocks."""
        self._items.append((collector, item))
        if not self._is_woken and not self.loop.is_closed():
            self._is_woken = True
            self.loop.call_soon_threadsafe(self._open)

    def _open(self) -> None:
        self._is_woken = False  # first: what comes from now on wakes the loop again
        while self._items:
            collector, item = self._items.popleft()
            collector.put(item)


class RequestOutputCollector:
    """A sink for the engine, a source for one reader in the loop that made it.

    Holds the newest snapshot of each request only: a reader that is behind skips the older ones,
    whose tokens the newest has too. An error comes before everything that has not been taken.
    """

    def __init__(self, mailbox: Mailbox | None = None) -> None:
        """``mailbox``: of this loop, shared with others; None: one of its own."""
        self._mailbox = mailbox or Mailbox()
        self._newest: dict[str, Snapshot] = {}
        self._error: BaseException | None = None
        self._more = Wakeup()

    def __call__(self, item: Snapshot | BaseException) -> None:
        """From any thread; never blocks."""
        self._mailbox.put(self, item)

    async def take(self) -> Snapshot:
        """The snapshot of the request that has waited longest; raises the error that came."""
        while not self._newest and self._error is None:
            await self._more.next()
        if self._error is not None:
            raise self._error
        return self._newest.pop(next(iter(self._newest)))

    def put(self, item: Snapshot | BaseException) -> None:
        """Within the loop."""
        if isinstance(item, BaseException):
            self._error = item
        else:
            self._newest[item.request_id] = item
        self._more.wake()
