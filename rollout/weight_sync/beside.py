"""Work done in order on one thread beside the caller's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from rollout.background import NativeThread
from rollout.errors import TransferFailed


class Beside:
    """Runs tasks one after the other; after the first error none of them.

    ``do``, ``check`` and ``wait`` are for one thread, ``close`` for any. The tasks have deadlines
    of their own, so that ``wait`` ends. The thread starts with the first task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | threading.Event | None]
        self._tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def do(self, task: Callable[[], None]) -> None:
        """Have ``task`` run after those given before; raises what one of them has raised."""
        self.check()
        if self._thread is None:
            self._thread = NativeThread(self._name, self._run, self.close)
            self._thread.start()
        self._tasks.put(task)

    def check(self) -> None:
        """Raise what a task has raised, if one has."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until all tasks given so far have run; raises what one of them has raised."""
        if self._thread is not None:
            done = threading.Event()
            self._tasks.put(done)
            done.wait()
        self.check()

    def close(self) -> None:
        """Begin no further task; one that is running is not waited for. The last call."""
        if self._error is None:
            self._error = TransferFailed("the update has ended")
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
            elif self._error is None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    self._error = error
