"""A call from its arrival until the engine has it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection
from concurrent.futures import Future, InvalidStateError
from typing import Any


class ComingCall:
    """Its prompts are made ready, its grammars compiled, and the version it asks for waited for.

    ``aborted``: those of its requests that are to end once the engine has them. ``num_sequences``:
    how many it brings. ``abort`` is for any thread, the rest for the loop of the call.
    """

    def __init__(self, request_ids: Collection[str], num_sequences: int) -> None:
        self.request_ids, self.num_sequences = frozenset(request_ids), num_sequences
        self.aborted: set[str] = set()
        self._over: Future[None] = Future()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left of it that is worth waiting for."""
        return self._over.done()

    def abort(self, request_ids: Collection[str] | None) -> int:
        """These, or all; returns how many of them were not aborted before."""
        given = (
            self.request_ids if request_ids is None else self.request_ids.intersection(request_ids)
        )
        new = given - self.aborted
        self.aborted |= new
        if len(self.aborted) == len(self.request_ids):
            with contextlib.suppress(InvalidStateError):  # it was over already
                self._over.set_result(None)
        return len(new)

    async def until(self, work: Future[Any]) -> None:
        """Wait for ``work``, whose error is raised, or until this is over; then nobody needs it."""
        waiting, over = asyncio.wrap_future(work), asyncio.wrap_future(self._over)
        try:
            await asyncio.wait((waiting, over), return_when=asyncio.FIRST_COMPLETED)
            if waiting.done():
                waiting.result()
        finally:
            waiting.cancel()
