"""``--follow DIR``: checkpoints that appear in a directory become versions of what is served."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

from rollout.distributed.native_thread import NativeThread

if TYPE_CHECKING:
    from rollout.api.backend import ServedBackend

_WAIT = 5.0  # seconds for an update that is under way when the service ends


def check_followed(directory: str | None, weight_dirs: Sequence[str]) -> None:
    """Raises ``ConfigError`` for one that is none, or may not be read."""
    from rollout.weight_sync.versions.directories import allowed

    if directory is not None:
        allowed(directory, weight_dirs)


@contextlib.asynccontextmanager
async def following(
    directory: str | None, weight_dirs: Sequence[str], timeout: float, backend: ServedBackend
) -> AsyncIterator[None]:
    """Updates from ``directory`` come from a thread beside the servers, through no port."""
    if directory is None:
        yield
        return
    from rollout.weight_sync.versions.follower import Follower

    counters, link = backend.counters, backend.link
    counters.following = directory

    def note(error: str) -> None:
        counters.follow_error = error
        counters.follow_failures += bool(error)

    follower = Follower(directory, weight_dirs, lambda: link, timeout=timeout, on_state=note)
    ended = threading.Event()
    thread = NativeThread("follow", lambda: follower.run(ended), ended.set)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        follower.interrupt("the service ends")
        await asyncio.to_thread(thread.join, _WAIT)
