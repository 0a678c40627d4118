"""A thread of a rank beside the one that runs its steps: it stages updates, or replies."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

import torch

from rollout.distributed.native_thread import NativeThread


class JobThread:
    """Runs jobs one after the other, in the order given. Started by the first job.

    ``num_threads`` limits what its own operations use, so that steps keep their cores; it also
    sets torch's value for threads that come later, so the caller sets its own afterwards: then
    the thread starts at once. None leaves torch's settings alone.
    """

    def __init__(self, name: str, num_threads: int | None = None) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._num_threads = num_threads
        self._thread = NativeThread(name, self._run, lambda: self.close(0.0))
        self._lock = threading.Lock()
        self._ended = False
        self._ready = threading.Event()
        if num_threads is not None:
            self._thread.start()
            self._ready.wait()

    def submit(self, job: Callable[[], None]) -> bool:
        """Queue a job, which must not raise; False, and it never runs, after ``close``."""
        with self._lock:
            if self._ended:
                return False
            if self._thread.ident is None:
                self._thread.start()
            self._jobs.put(job)
            return True

    def close(self, timeout: float) -> bool:
        """Let what is queued run, then end; whether it did within ``timeout`` seconds."""
        with self._lock:
            self._ended = True
            started = self._thread.ident is not None
        if not started:
            return True
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        self._ready.set()
        while (job := self._jobs.get()) is not None:
            job()
