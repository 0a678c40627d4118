"""Grammars that wait to be compiled, one after the other, in a thread of their own."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from heapq import heappop, heappush
from typing import Any

from rollout.distributed.futures import resolve
from rollout.engine.structured.process import (
    COMPILE_LIMIT,
    GrammarProcess,
    Lost,
    ProcessLostError,
)
from rollout.errors import EngineClosed, EngineError, EngineOverloaded, InvalidRequest

_MAX_KNOWN = 128  # grammars; the process keeps twice as many
_MAX_QUEUED = 16384  # grammars that wait to be compiled
_ATTEMPTS = 4  # processes lost by others' doing

Running = Callable[[], GrammarProcess]


def key_of(spec: Mapping[str, Any]) -> str:
    return json.dumps(spec, sort_keys=True)


class CompileQueue:
    """``running()``: the process, started where it is not.

    Grammars of sequences that run already (``urgent``) go first.
    """

    def __init__(self, running: Running) -> None:
        self._running = running
        self._changed = threading.Condition()
        self._waiting: list[tuple[bool, int, Mapping[str, Any], Future[None]]] = []
        self._count = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def compile(self, spec: Mapping[str, Any], *, urgent: bool = False) -> Future[None]:
        """Done when the process knows it; it may raise ``InvalidRequest``. Waits for nobody."""
        done: Future[None] = Future()
        with self._changed:
            if self._closed:
                raise EngineClosed("the engine was shut down")
            if not urgent and len(self._waiting) >= _MAX_QUEUED:
                raise EngineOverloaded(
                    f"{len(self._waiting)} grammars wait to be compiled already; try again later"
                )
            self._count += 1
            heappush(self._waiting, (not urgent, self._count, spec, done))
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rollout-grammars", daemon=True
                )
                self._thread.start()
            self._changed.notify()
        return done

    def close(self) -> None:
        """End the thread; what it waits for has to be ended by the caller before. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if not self._waiting:
                    return
                _, _, spec, done = heappop(self._waiting)
            if done.set_running_or_notify_cancel():
                resolve(done, partial(self._compile, spec))

    def _compile(self, spec: Mapping[str, Any]) -> None:
        """A grammar with which the process has ended twice is given up, one that is slow at once;
        what others do to the process is no fault of its own.
        """
        key, ended = key_of(spec), 0
        for _ in range(_ATTEMPTS):
            if self._closed:
                raise EngineClosed("the engine was shut down")
            process = self._running()
            if key in process.known:
                return  # compiled for somebody else meanwhile
            try:
                process.compile(spec)
            except ProcessLostError as lost:
                if lost.why is Lost.SLOW_COMPILE:
                    raise InvalidRequest(
                        f"structured_outputs could not be compiled within {COMPILE_LIMIT:g} s: the "
                        "grammar is too large or too ambiguous; make it simpler"
                    ) from lost
                ended += lost.why is Lost.ENDED
                if ended == 2:
                    raise InvalidRequest(
                        "structured_outputs ended the process that compiled it: the grammar takes "
                        "too much memory, or is nested too deep; make it simpler"
                    ) from lost
                continue
            process.known[key] = None
            while len(process.known) > _MAX_KNOWN:
                process.known.popitem(last=False)
            return
        raise EngineError(
            f"structured_outputs could not be compiled: the process that compiles grammars was "
            f"lost {_ATTEMPTS} times meanwhile; its own words are on stderr"
        )
