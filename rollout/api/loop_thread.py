"""A thread with its own event loop, and the calls that other threads make in it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any, Generic, TypeVar

from rollout.errors import FORKED, SHUT_DOWN, EngineClosed

_LOOK = 1.0  # seconds between looks at whether the loop still runs
BLOCKING_CALLS = 16  # threads for what takes one: loading, tokenising, asking a service

R = TypeVar("R")


class LoopThread:
    """A daemon thread that runs one event loop."""

    def __init__(self) -> None:
        self._loop, self._process = asyncio.new_event_loop(), os.getpid()
        self._pool = ThreadPoolExecutor(BLOCKING_CALLS, thread_name_prefix="rollout-call")
        self._loop.set_default_executor(self._pool)
        self._thread = threading.Thread(target=self._main, name="rollout-loop", daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, R] | Any) -> R:
        """Its result; interrupting the wait (Ctrl-C) cancels it."""
        call: _Call[R] = _Call(coroutine, self._loop)
        try:
            try:
                if not self._thread.is_alive():
                    raise RuntimeError("the loop has ended")
                self._loop.call_soon_threadsafe(call.begin)
            except RuntimeError:  # the loop may be closed between any check and this call
                call.drop()
                raise EngineClosed(self._why_over()) from None
            # Looks up now and then: what came in as the loop ended is never run.
            while not wait([call.result], _LOOK).done and self._thread.is_alive():
                pass
            if not call.result.done():
                call.drop()  # nobody will run it any more
                raise EngineClosed("this Rollout was shut down while the call ran")
            return call.result.result()
        except CancelledError:  # by the end of the loop, in another thread
            raise EngineClosed("this Rollout was shut down while the call ran") from None
        finally:
            call.cancel()  # no effect when it has ended

    def _why_over(self) -> str:
        return SHUT_DOWN if os.getpid() == self._process else FORKED

    def close(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._pool.shutdown()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(asyncio.sleep(0))  # calls that came with the end
            self._end_tasks()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._end_tasks()  # of calls that came even then
        finally:
            self._loop.close()

    def _end_tasks(self) -> None:
        while left := asyncio.all_tasks(self._loop):
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))


class _Call(Generic[R]):
    """One coroutine that another thread wants run in the loop.

    It is made before the loop hears of it: an interrupt may come between any two steps of the
    thread that waits, and ``cancel`` ends the coroutine whether the loop has begun it or not.
    """

    def __init__(self, coroutine: Any, loop: asyncio.AbstractEventLoop) -> None:
        self.result: Future[R] = Future()
        self._coroutine, self._loop = coroutine, loop
        self._task: asyncio.Task[R] | None = None

    def begin(self) -> None:
        """In the loop."""
        if self.result.cancelled():
            self.drop()
            return
        self._task = self._loop.create_task(_await(self._coroutine))
        self._task.add_done_callback(self._ended)

    def cancel(self) -> None:
        """In the thread that waits: nobody wants its result any more."""
        if not self.result.done() and self.result.cancel():
            with contextlib.suppress(RuntimeError):  # closed: the loop has ended its tasks
                self._loop.call_soon_threadsafe(self._cancel_task)

    def drop(self) -> None:
        """It is never run."""
        self._coroutine.close()

    def _cancel_task(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[R]) -> None:
        failure = None if task.cancelled() else task.exception()  # looked at: it was not forgotten
        if task.cancelled():
            self.drop()  # it may have been cancelled before its first step
            self.result.cancel()
        if not self.result.set_running_or_notify_cancel():
            return
        if failure is not None:
            self.result.set_exception(failure)
        else:
            self.result.set_result(task.result())


async def _await(awaitable: Any) -> Any:
    return await awaitable
