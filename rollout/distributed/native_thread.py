"""Threads that wait inside torch, gloo, NCCL or CUDA, and the end of the interpreter.

While the interpreter ends, CPython before 3.14 ends a daemon thread that comes back from native
code by ``pthread_exit``, which unwinds its C++ frames; one that may not be unwound calls
``std::terminate``, and a program that has done its work ends by SIGABRT. Threads that wait in
Python alone (sockets, queues, locks) have no such frames and need nothing.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

T = TypeVar("T")
_EXIT_WAIT = 0.5  # seconds that the end of the program waits for such a thread
_END_LIMIT = 30  # seconds for the interpreter to end while one is left


class NativeThread(threading.Thread):
    """A daemon thread whose ``target`` may wait inside native code.

    The end of the program calls ``stop``, which should make it end, and waits for it a little. One
    that is still in there is left where it is: it never comes back.
    """

    def __init__(
        self, name: str, target: Callable[[], None], stop: Callable[[], object] | None = None
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._work: Callable[[], None] | None = target
        self._stop_work = stop
        self._process = os.getpid()

    def start(self) -> None:
        atexit.register(self._end)
        try:
            super().start()
        except RuntimeError:  # no memory for a thread, or the program has ended
            atexit.unregister(self._end)
            raise

    def run(self) -> None:
        work, self._work = self._work, None
        assert work is not None
        try:
            work()
        finally:
            del work
            self._stop_work = None
            atexit.unregister(self._end)

    def _end(self) -> None:
        if not self.is_alive():
            return  # it begins only now, or Ctrl-C came before it had begun
        if os.getpid() != self._process:
            return  # a forked process ends: the thread, and what it works on, are its parent's
        stop = self._stop_work
        if stop is not None:
            stop()
        self.join(_EXIT_WAIT)
        if self.is_alive():
            hang_instead_of_terminate()


def on_this_stream(work: Callable[[], T]) -> Callable[[], T]:
    """``work`` for another thread, on the GPU and the stream that this one works on: any thread
    begins on the first GPU's default stream, which waits for nothing that was asked of others.
    """
    cuda = torch.cuda  # parts of it have no types
    if not cuda.is_initialized():  # type: ignore[no-untyped-call]
        return work
    stream = cuda.current_stream()

    def run() -> T:
        with cuda.stream(stream):
            return work()

    return run


def hang_instead_of_terminate() -> None:
    """From now on a thread that C++ would end the whole process for waits for ever instead.

    What CPython 3.14 does with every daemon thread at its end. For the last moments of a program,
    on its main thread. Should that one be ended so, too, SIGALRM ends the process after all.
    """
    with suppress(
        OSError, AttributeError, ValueError
    ):  # no libstdc++ here: nothing that can be done
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(_END_LIMIT)
        runtime, system = ctypes.CDLL("libstdc++.so.6"), ctypes.CDLL(None)
        runtime._ZSt13set_terminatePFvvE(ctypes.cast(system.pause, ctypes.c_void_p))
