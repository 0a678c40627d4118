"""The grammars of one engine: judged before a request is admitted, followed while it runs."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.sequence import Sequence as TokenSequence
from rollout.engine.structured.process import DONE, FOLLOWS, SLOW, GrammarProcess, ProcessLostError
from rollout.errors import EngineClosed, EngineError, EngineOverloaded, InvalidRequest, RolloutError

START_LIMIT = 120.0  # seconds until the process is ready: it imports torch and transformers
COMPILE_LIMIT = 10.0  # seconds for one grammar
STEP_LIMIT = 3.0  # seconds for the masks of one step
MAX_FOLLOWED = 4096  # sequences; of one that was forgotten all tokens are told again
_MAX_KNOWN = 128  # grammars; the process keeps twice as many
_MAX_QUEUED = 16384  # grammars that wait to be compiled

log = logging.getLogger(__name__)

Verdict = NDArray[np.int32] | RolloutError | None  # a mask; why it cannot go on; nothing may follow


class Grammars:
    """``tokenizer``: its directory or hub id. The process starts with the first grammar.

    ``compile`` is for any thread, ``follow`` for the engine's, ``close`` for any.
    """

    def __init__(self, tokenizer: str, vocab_size: int, eos_ids: frozenset[int]) -> None:
        self._settings = {
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
            "eos_ids": sorted(eos_ids),
        }
        self._process: GrammarProcess | None = None
        self._starting = threading.Lock()  # held while a process starts: never on an event loop
        self._books = threading.Lock()  # of what follows; never held over a wait
        self._known: OrderedDict[str, None] = OrderedDict()  # to the process that runs now
        self._queued = 0
        self._compiling: ThreadPoolExecutor | None = None
        self._closed = False

    def compile(self, spec: Mapping[str, Any]) -> Future[None]:
        """Whether a grammar can be followed: a future that is done within ``COMPILE_LIMIT`` once
        those before it are; it may raise ``InvalidRequest``.
        """
        done: Future[None] = Future()
        key = json.dumps(spec, sort_keys=True)
        if key in self._known:
            done.set_result(None)
            return done
        if importlib.util.find_spec("xgrammar") is None:
            raise InvalidRequest(
                "structured_outputs need xgrammar, which this engine's environment has not: "
                "install the extra `structured` (in a checkout: pip install -e '.[structured]')"
            )
        with self._books:
            if self._closed:
                raise EngineClosed("the engine was shut down")
            if self._queued >= _MAX_QUEUED:
                raise EngineOverloaded(
                    f"{self._queued} grammars wait to be compiled already; try again later"
                )
            if self._compiling is None:
                self._compiling = ThreadPoolExecutor(1, "rollout-grammars")
            self._queued += 1
            done = self._compiling.submit(self._compile, key, spec)
        done.add_done_callback(self._unqueue)
        return done

    def follow(self, sequences: Sequence[TokenSequence]) -> Iterator[tuple[TokenSequence, Verdict]]:
        """What may follow each; who is late or brings the process down ends alone."""
        rest, ended = list(sequences), False
        while rest:
            try:
                process = self._running()
                states, masks = process.masks(*_request(process, rest), timeout=STEP_LIMIT)
            except ProcessLostError as lost:
                if not lost.late and not ended:
                    ended = True  # somebody else's doing, unless it happens again
                    continue
                slow = rest.pop(min(lost.row, len(rest) - 1))
                log.error("the grammar of request %r is given up: %s", slow.request_id, lost)
                yield slow, _lost("followed", STEP_LIMIT, lost)
                continue
            except RolloutError as error:
                yield from ((sequence, error) for sequence in rest)
                return
            for sequence, state, mask in zip(rest, states, masks.numpy(), strict=True):
                process.told[sequence.seq_id] = sequence.output_len
                verdicts: dict[int, Verdict] = {FOLLOWS: mask, DONE: None, SLOW: _SLOW}
                yield sequence, verdicts.get(state, _REFUSED)
            return

    def close(self) -> None:
        """End the process. Idempotent."""
        with self._books:
            self._closed = True
        with self._starting:
            process, compiling = self._process, self._compiling
        if process is not None:
            process.close()
        if compiling is not None:
            compiling.shutdown()

    def _unqueue(self, _: Future[None]) -> None:
        with self._books:
            self._queued -= 1

    def _compile(self, key: str, spec: Mapping[str, Any]) -> None:
        if key in self._known:
            return  # compiled for somebody else meanwhile
        for last in (False, True):
            try:
                self._running().compile(spec, COMPILE_LIMIT)
                break
            except ProcessLostError as lost:
                self._known.clear()
                if last or lost.late:
                    raise _lost("compiled", COMPILE_LIMIT, lost) from lost
        self._known[key] = None
        while len(self._known) > _MAX_KNOWN:
            self._known.popitem(last=False)

    def _running(self) -> GrammarProcess:
        with self._starting:
            if self._closed:
                raise EngineClosed("the engine was shut down")
            if self._process is None or not self._process.alive:
                if self._process is not None:
                    self._process.close()
                self._known.clear()
                self._process = GrammarProcess(self._settings, START_LIMIT)
            return self._process


_REFUSED = EngineError("a token was drawn that the grammar does not allow")


_SLOW = InvalidRequest(
    "structured_outputs takes too long to follow: the grammar is too ambiguous; make it simpler"
)


def _lost(verb: str, limit: float, lost: ProcessLostError) -> InvalidRequest:
    if lost.late:
        return InvalidRequest(
            f"structured_outputs could not be {verb} within {limit:g} s: the grammar is too large "
            "or too ambiguous; make it simpler"
        )
    return InvalidRequest(
        f"structured_outputs ended the process that {verb} it: the grammar takes too much memory, "
        "or is nested too deep; make it simpler"
    )


def _request(
    process: GrammarProcess, sequences: Sequence[TokenSequence]
) -> tuple[list[dict[str, Any]], list[int]]:
    """What ``process`` does not know of each yet, and what it need not know any more."""
    rows = []
    for sequence in sequences:
        told = process.told.pop(sequence.seq_id, None)
        row: dict[str, Any] = {"sequence": sequence.seq_id}
        row["tokens"] = sequence.token_ids[sequence.prompt_len + (told or 0) :]
        if told is None:
            row["spec"] = sequence.params.structured_outputs
        process.told[sequence.seq_id] = 0  # newest
        rows.append(row)
    many = len(process.told) - max(MAX_FOLLOWED, len(rows))
    forget = list(process.told)[: max(many, 0)]
    for seq_id in forget:
        del process.told[seq_id]
    return rows, forget
