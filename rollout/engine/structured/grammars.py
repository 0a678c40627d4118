"""The grammars of one engine: judged before a request is admitted, followed while it runs."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from rollout.engine.structured.compile_queue import CompileQueue, key_of
from rollout.engine.structured.follow_queue import FollowQueue
from rollout.engine.structured.process import GrammarProcess
from rollout.errors import EngineClosed, InvalidRequest

START_LIMIT = 120.0  # seconds until the process is ready: it imports torch and transformers


class Grammars:
    """``tokenizer``: its directory. The process starts with the first grammar. ``code``: what
    ``Tokenizer.load`` is told of code that lies with it.

    ``compile`` and ``close`` are for any thread, ``followed`` is the engine's thread's.
    ``on_answer`` is called, in a thread of their own, when there is something to take from there.
    """

    def __init__(
        self, tokenizer: str, vocab_size: int, eos_ids: frozenset[int], **code: bool | str | None
    ) -> None:
        self._settings = {
            "tokenizer": {"path": tokenizer, **code},
            "vocab_size": vocab_size,
            "eos_ids": sorted(eos_ids),
        }
        self.on_answer: Callable[[], object] = lambda: None
        self._process: GrammarProcess | None = None
        self._start_lock = threading.Lock()  # held while a process starts: never on an event loop
        self._closed = False
        self._compiling = CompileQueue(self._running)
        self.followed = FollowQueue(self._running, self._compiling, lambda: self.on_answer())

    def compile(self, spec: Mapping[str, Any]) -> Future[None]:
        """Whether a grammar can be followed: a future; it may raise ``InvalidRequest``."""
        process, known = self._process, Future[None]()
        if process is not None and process.alive and key_of(spec) in process.known:
            known.set_result(None)
            return known
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidRequest(
                "structured_outputs need xgrammar, which this engine's environment has not: "
                "install the extra `structured` (in a checkout: pip install -e '.[structured]')"
            )
        return self._compiling.compile(spec)

    def close(self) -> None:
        """End the process and all threads. Idempotent."""
        self._closed = True
        with self._start_lock:
            if self._process is not None:
                self._process.close()
        self._compiling.close()
        self.followed.close()

    def _running(self) -> GrammarProcess:
        with self._start_lock:
            if self._closed:
                raise EngineClosed("the engine was shut down")
            if self._process is None or not self._process.alive:
                if self._process is not None:
                    self._process.close()
                self._process = GrammarProcess(self._settings, START_LIMIT)
            return self._process
