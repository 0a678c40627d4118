"""Waiting, until a deadline, for what was asked of the engine's thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from typing import Any, Generic, TypeVar

from rollout.errors import DeadlineExceeded

T = TypeVar("T")


class DeadlineFuture(Generic[T]):
    """A future of the engine's thread, waited for until a deadline: ``result()`` in a thread, or
    ``await`` in a task, which takes none.

    The deadline is ``timeout`` seconds from now; ``DeadlineExceeded`` names ``what``, and
    what ``why`` then knows of its reason. Whatever
    ends the waiting but a result calls ``undo``, also when the waiting task is cancelled. What has
    begun at the deadline is waited for as long again: it can no longer be taken back, so its
    result is the truth.
    """

    def __init__(
        self,
        future: Future[T],
        what: str,
        timeout: float,
        undo: Callable[[], Any] | None = None,
        why: Callable[[], str] = lambda: "",
    ) -> None:
        self._future, self._what, self._timeout, self._undo = future, what, timeout, undo
        self._why = why
        self._deadline = time.monotonic() + timeout

    def result(self) -> T:
        try:
            wait((self._future,), self._left())
            if self._has_begun():
                wait((self._future,), self._timeout)
            return self._outcome()
        except BaseException:
            self._failed()
            raise

    def __await__(self) -> Generator[Any, None, T]:
        return self._wait().__await__()

    async def _wait(self) -> T:
        waiting = asyncio.wrap_future(self._future)
        waiting.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        try:
            await asyncio.wait((waiting,), timeout=self._left())
            if self._has_begun():
                await asyncio.wait((waiting,), timeout=self._timeout)
            return self._outcome()
        except BaseException:
            waiting.cancel()  # what has not begun is not done for nobody
            self._failed()
            raise

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _has_begun(self) -> bool:
        """Whether it is being done this moment; at a deadline: what has not begun never will."""
        return not self._future.done() and not self._future.cancel()

    def _outcome(self) -> T:
        if self._future.done() and not self._future.cancelled():
            return self._future.result()
        late = f"{self._what} did not end within {self._timeout:g} s"
        raise DeadlineExceeded(late + self._why())

    def _failed(self) -> None:
        undo, self._undo = self._undo, None
        if undo is not None:
            self._future.cancel()
            undo()
