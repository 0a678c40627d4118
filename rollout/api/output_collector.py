"""From the engine's thread to one reader in an event loop."""

from __future__ import annotations

import asyncio

from rollout.engine.request_state import Snapshot


class RequestOutputCollector:
    """A sink for the engine, a source for one reader in the loop that made it.

    Holds the newest snapshot of each request only: a reader that is behind skips the older ones,
    whose tokens the newest has too. An error comes before everything that has not been taken.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._newest: dict[str, Snapshot] = {}
        self._error: BaseException | None = None
        self._some = asyncio.Event()

    def __call__(self, item: Snapshot | BaseException) -> None:
        """From any thread; never blocks."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, item)

    async def take(self) -> Snapshot:
        """The snapshot of the request that has waited longest; raises the error that came."""
        await self._some.wait()
        if self._error is not None:
            raise self._error
        snapshot = self._newest.pop(next(iter(self._newest)))
        if not self._newest:
            self._some.clear()
        return snapshot

    def _put(self, item: Snapshot | BaseException) -> None:
        if isinstance(item, BaseException):
            self._error = item
        else:
            self._newest[item.request_id] = item
        self._some.set()
