"""Sequences that wait for the mask over their next token, in a thread of their own.

    engine's thread --- ask(sequences) -----------> [ waiting ] --- one batch at a time ---> process
                    <-- take() <- [ answered ] <------------------- masks, states -----------'

A sequence is asked for once, and then does not step until its answer is there; so nobody changes
its tokens while this thread reads them. A new process is told all of them again, after their
grammars have been compiled anew: by ``CompileQueue``, while those that it knows already go on.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout.engine.sequences.sequence import Sequence, Status
from rollout.engine.structured.compile_queue import CompileQueue, Running, key_of
from rollout.engine.structured.process import (
    DONE,
    FOLLOW_LIMIT,
    FOLLOWS,
    SLOW,
    STUCK,
    GrammarProcess,
    Lost,
    ProcessLostError,
)
from rollout.errors import EngineClosed, EngineError, InvalidRequest, RolloutError

MAX_FOLLOWED = 4096  # sequences; of one that was forgotten all tokens are told again
_BLAMED = 2  # processes lost while a sequence was under way
_LOSSES = 6  # in a row, and no answer between them

log = logging.getLogger(__name__)

Verdict = NDArray[np.int32] | RolloutError | None  # a mask; why it cannot go on; nothing may follow


class FollowQueue:
    """``ask``, ``wait`` and ``take`` are the engine's thread's; ``on_answer`` is called in this
    queue's own thread whenever there is something to take.
    """

    def __init__(
        self, running: Running, compiling: CompileQueue, on_answer: Callable[[], object]
    ) -> None:
        self._running, self._compiling, self._on_answer = running, compiling, on_answer
        self._changed = threading.Condition()
        self._waiting: dict[int, Sequence] = {}
        self._answered: list[tuple[Sequence, Verdict]] = []
        self._compiles: dict[str, Future[None]] = {}  # for those that wait; this thread's own
        self._strikes: dict[int, int] = {}  # sequence -> processes lost while it was under way
        self._losses = 0
        self._thread: threading.Thread | None = None
        self._closed = False

    def ask(self, sequences: list[Sequence]) -> list[Sequence]:
        """Take those that do not wait yet, and say which; never waits."""
        with self._changed:
            asked = self._waiting.keys() | {sequence.seq_id for sequence, _ in self._answered}
            new = [sequence for sequence in sequences if sequence.seq_id not in asked]
            if self._closed or not new:
                return []
            self._waiting.update((sequence.seq_id, sequence) for sequence in new)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="rollout-follow", daemon=True
                )
                self._thread.start()
            self._changed.notify_all()
        return new

    def wait(self, sequences: list[Sequence], seconds: float) -> None:
        """Return when all of them are answered, or after ``seconds``."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not any(s.seq_id in self._waiting for s in sequences),
                seconds,
            )

    def take(self) -> list[tuple[Sequence, Verdict]]:
        """What was answered since the last time."""
        with self._changed:
            answered, self._answered = self._answered, []
        return answered

    def close(self) -> None:
        """End the thread; the process has to be ended by the caller before. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    # ---- in the thread ----

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._waiting)
                if self._closed:
                    return
                waiting = list(self._waiting.values())
            try:
                self._serve(waiting)
            except EngineClosed:
                return
            except Exception as error:
                log.exception("grammars could not be followed")
                text = f"a grammar could not be followed: {type(error).__name__}: {error}"
                failure = error if isinstance(error, RolloutError) else EngineError(text)
                self._losses = 0
                self._answer([(sequence, failure) for sequence in waiting])

    def _serve(self, waiting: list[Sequence]) -> None:
        """One batch, or a moment's waiting for grammars."""
        ended = [seq for seq in waiting if seq.status is Status.FINISHED]
        self._answer([(sequence, None) for sequence in ended])
        process = self._running()
        going_on = [seq for seq in waiting if seq.status is not Status.FINISHED]
        unknown = [seq for seq in going_on if seq.seq_id not in process.told]
        self._have_compiled(process, unknown)
        batch = [seq for seq in going_on if seq.seq_id in process.told or _knows(process, seq)]
        suspects = [seq for seq in batch if seq.seq_id in self._strikes]
        batch = [seq for seq in batch if seq.seq_id not in self._strikes] or suspects[:1]
        if not batch:
            with self._changed:
                self._changed.wait(0.05)
            return
        try:
            states, masks = process.masks(*_request(process, batch))
        except ProcessLostError as lost:
            self._blame(batch, lost)
            return
        self._losses = 0
        found: list[tuple[Sequence, Verdict]] = []
        for sequence, state, mask in zip(batch, states, masks.numpy(), strict=True):
            process.told[sequence.seq_id] = sequence.output_len
            self._strikes.pop(sequence.seq_id, None)
            found.append((sequence, _verdict(sequence, state, mask)))
        self._answer(found)

    def _have_compiled(self, process: GrammarProcess, sequences: list[Sequence]) -> None:
        """Ask for the grammars that ``process`` does not know, ahead of all that others ask for;
        end the sequences of those that cannot be compiled any more.
        """
        asked, self._compiles = self._compiles, {}
        for sequence in sequences:
            spec = sequence.params.structured_outputs
            assert spec is not None, "only what has a grammar is asked for"
            key = key_of(spec)
            if key in process.known:
                continue
            future = self._compiles.get(key) or asked.get(key)
            error = future.exception() if future is not None and future.done() else None
            if error is not None:
                known = error if isinstance(error, RolloutError) else EngineError(str(error))
                self._give_up(sequence, known)
                continue
            if future is None or future.done():  # never asked, or by a process that is lost
                future = self._compiling.compile(spec, urgent=True)
            self._compiles[key] = future

    def _blame(self, batch: list[Sequence], lost: ProcessLostError) -> None:
        """End the sequence that is too slow, or under way for the second time when it happens."""
        if lost.why is Lost.CLOSED and self._closed:
            raise EngineClosed("the engine was shut down")
        log.warning("following grammars begins anew: %s", lost)
        self._losses += 1
        if self._losses >= _LOSSES:
            raise EngineError(
                f"the process that follows grammars was lost {_LOSSES} times in a row: {lost}; its "
                "own words are on stderr"
            )
        if not 0 <= lost.row < len(batch):
            return
        sequence = batch[lost.row]
        if lost.why is Lost.SLOW_ROW:
            self._give_up(sequence, InvalidRequest(_about(sequence, _SLOW_TOKEN)))
        elif lost.why in (Lost.ENDED, Lost.HUNG) and not lost.compiling:
            strikes = self._strikes[sequence.seq_id] = self._strikes.get(sequence.seq_id, 0) + 1
            if strikes >= _BLAMED:
                hung = lost.why is Lost.HUNG
                kind, text = (EngineError, _HUNG) if hung else (InvalidRequest, _ENDED)
                self._give_up(sequence, kind(_about(sequence, text)))

    def _give_up(self, sequence: Sequence, error: RolloutError) -> None:
        log.error("the grammar of request %r is given up: %s", sequence.request_id, error)
        self._answer([(sequence, error)])

    def _answer(self, found: list[tuple[Sequence, Verdict]]) -> None:
        if not found:
            return
        with self._changed:
            for sequence, _ in found:
                self._waiting.pop(sequence.seq_id, None)
            self._answered += found
            self._changed.notify_all()
        for sequence, verdict in found:
            if verdict is None or isinstance(verdict, Exception):
                self._strikes.pop(sequence.seq_id, None)
        self._on_answer()


_REFUSED = "a token was drawn that the grammar does not allow"
_SLOW = "takes too long to follow: the grammar is too ambiguous; make it simpler"
_STUCK = (
    "cannot be kept: no token of the model's vocabulary spells what has to come next; ask for "
    "another text, or use a tokenizer that has its characters"
)
_SLOW_TOKEN = (
    f"could not be followed: one token took more than {FOLLOW_LIMIT:g} s of processor time; the "
    "grammar is too large or too ambiguous, make it simpler"
)
_ENDED = (
    "ended the process that followed it: the grammar takes too much memory, or is nested too deep; "
    "make it simpler"
)
_HUNG = (
    "cannot be followed: the process that does it was stopped twice meanwhile; is something on "
    "this machine stopping or starving processes?"
)


def _about(sequence: Sequence, text: str) -> str:
    return f"structured_outputs of request {sequence.request_id!r} {text}"


def _verdict(sequence: Sequence, state: int, mask: NDArray[np.int32]) -> Verdict:
    if state == FOLLOWS:
        return mask
    if state == DONE:
        return None
    if state == SLOW:
        return InvalidRequest(_about(sequence, _SLOW))
    if state == STUCK:
        return InvalidRequest(_about(sequence, _STUCK))
    return EngineError(_about(sequence, f"cannot be followed: {_REFUSED}"))


def _knows(process: GrammarProcess, sequence: Sequence) -> bool:
    spec = sequence.params.structured_outputs
    return spec is not None and key_of(spec) in process.known


def _request(
    process: GrammarProcess, sequences: list[Sequence]
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
