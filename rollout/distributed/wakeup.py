"""How a task waits for what other callbacks of its event loop bring."""

from __future__ import annotations

import asyncio


class Wakeup:
    """Of one reader, which looks first, and awaits ``next`` where there is nothing for it.

    Cheaper than an ``asyncio.Event``: who brings something pays for the reader only if it waits.
    """

    __slots__ = ("_waited",)

    def __init__(self) -> None:
        self._waited: asyncio.Future[None] | None = None

    def next(self) -> asyncio.Future[None]:
        """Done at the next ``wake``; one before it is not remembered."""
        self._waited = asyncio.get_running_loop().create_future()
        return self._waited

    def wake(self) -> None:
        """Within the reader's loop."""
        if (waited := self._waited) is not None:
            self._waited = None
            if not waited.done():  # unless its reader was cancelled
                waited.set_result(None)
