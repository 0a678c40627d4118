"""Threads for the verbs that wait: of their own, so that nothing else ever waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from rollout.distributed.native_thread import on_this_stream
from rollout.errors import EngineClosed, EngineOverloaded

MOST = 64  # verbs that may wait at once: the ranks of a large trainer, each with one
T = TypeVar("T")


class VerbThreads:
    """Runs blocking verbs (updates, rollbacks, digests), each in a thread, for one event loop.

    A verb works on the GPU and the stream of who awaits it. Begun, it runs to its end even when
    that one is cancelled. A verb that would find no thread is refused: it could not end before
    those it waits behind, perhaps for itself.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(MOST, thread_name_prefix="rollout-verb")
        self._busy = 0

    async def run(self, verb: Callable[[], T]) -> T:
        """The result of ``verb``; raises ``EngineOverloaded`` where too many run already."""
        if self._busy >= MOST:
            raise EngineOverloaded(
                f"{self._busy} verbs about weights wait here already; try again when one has ended"
            )
        try:
            call = on_this_stream(verb)
            running = asyncio.get_running_loop().run_in_executor(self._pool, call)
        except RuntimeError:
            raise EngineClosed("this rollout was shut down; make a new one") from None
        self._busy += 1
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def close(self) -> None:
        """Take no verb any more; those under way end by their own deadlines."""
        self._pool.shutdown(wait=False)

    def _ended(self, running: asyncio.Future[T]) -> None:
        self._busy -= 1
        if not running.cancelled():
            running.exception()  # seen, also where nobody awaits it any more
