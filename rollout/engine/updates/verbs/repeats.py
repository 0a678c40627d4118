"""Weight verbs over plain requests: one at a time, and a repeated one is answered as the first.

A client whose reply was lost sends its request again, and must not change anything by that. With an
``update_id`` a repeat is known by it, while the update is open and for the ``KEPT`` last ones that
ended. Without one it is known right after the first alone: the same content, on another connection.
Who has read a reply cannot repeat its request on the same connection; what comes there is meant.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from rollout.errors import RolloutError, UpdateInProgress, from_wire, to_wire

T = TypeVar("T")
KEPT = 16  # updates whose answers are remembered


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends a verb: ``update_id`` if it names its update, ``peer`` its connection if known."""

    update_id: str = ""
    peer: str = ""


@dataclass(frozen=True, slots=True)
class Said:
    """A verb as it was sent; ``content`` is what a repeat has to have in common beside the id."""

    verb: str
    caller: Caller
    content: str = ""

    def repeats(self, first: Said) -> bool:
        if (self.verb, self.content) != (first.verb, first.content):
            return False
        mine, its = self.caller, first.caller
        if mine.update_id or its.update_id:
            return mine.update_id == its.update_id
        return "" not in (mine.peer, its.peer) and mine.peer != its.peer


@dataclass(slots=True)
class _Running:
    said: Said
    answer: Future[Any] = field(default_factory=Future)


class VerbAnswers:
    """Runs verbs, and knows what was answered. Thread-safe.

    ``begins`` and ``ends`` are called around a verb that runs, under ``lock``.
    """

    def __init__(self, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        self.lock = threading.Lock()
        self._begins, self._ends = begins, ends
        self._running: _Running | None = None
        self._last: tuple[Said, Any] | None = None
        self._by_update: OrderedDict[str, dict[tuple[str, str], Any]] = OrderedDict()

    @property
    def is_busy(self) -> bool:
        return self._running is not None

    def running(self, verb: str) -> Future[Any] | None:
        """The answer of this verb, if it is what runs."""
        running = self._running
        return None if running is None or running.said.verb != verb else running.answer

    def run(
        self, said: Said, act: Callable[[], T], *, remember: Callable[[], bool] = lambda: True
    ) -> T:
        """The answer of ``act``, or of the verb that ``said`` repeats, for which it waits.

        ``UpdateInProgress`` while another verb runs. An error is the repeats' too that came while
        the verb ran; one that comes later runs itself, and is told what has become of the update.
        Where ``remember`` is false afterwards, what looks like a repeat later is none.
        """
        with self.lock:
            running = self._running
            if running is None:
                if (earlier := self._earlier(said)) is not None:
                    return cast(T, earlier[0])
                mine = self._running = _Running(said)
                self._begins()
        if running is not None:
            if not said.repeats(running.said):
                raise UpdateInProgress(
                    f"{said.verb}: {running.said.verb} is under way; wait for its answer, or end "
                    "what waits for a trainer by abort_weight_update"
                )
            return cast(T, running.answer.result())
        try:
            answer = act()
        except BaseException as error:
            self._over(None)
            # Another object than this thread raises: each has a traceback of its own.
            mine.answer.set_exception(
                from_wire(to_wire(error)) if isinstance(error, RolloutError) else error
            )
            raise
        self._over((said, answer) if remember() else None)
        mine.answer.set_result(answer)
        return answer

    def forget(self, update_id: str) -> None:
        """That update has failed: nothing of it is answered as if it had not. Under ``lock``."""
        self._last = None
        self._by_update.pop(update_id, None)

    def _over(self, said: tuple[Said, Any] | None) -> None:
        with self.lock:
            self._running, self._last = None, said
            if said is not None and (update_id := said[0].caller.update_id):
                answers = self._by_update.setdefault(update_id, {})
                answers[said[0].verb, said[0].content] = said[1]
                while len(self._by_update) > KEPT:
                    self._by_update.popitem(last=False)
            self._ends()

    def _earlier(self, said: Said) -> tuple[Any] | None:
        if self._last is not None and said.repeats(self._last[0]):
            return (self._last[1],)
        answers = self._by_update.get(said.caller.update_id, {})
        key = (said.verb, said.content)
        return (answers[key],) if key in answers else None
