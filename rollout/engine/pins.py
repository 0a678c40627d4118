"""Requests that finish on the version they began with, while others run on the live one.

An update asks so for all that has begun (``in_flight="pin"``), or a request for itself (``pin``).
Both of the ranks' instances step then: a step names the version that computes it, and steps of the
two take turns. The next update needs the older instance, and waits for the end of the pins.

    commit, "pin" asked for --> PINNED --none is left--------------------------> ended
                                  |----deadline, next update, sleep--> fallback ---^
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from rollout.engine.requests.output import OutputProcessor
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.sequences.sequence import Sequence
from rollout.generation.metrics import EngineCounters


@dataclass(frozen=True, slots=True, kw_only=True)
class PinTerms:
    """For how long an update's requests may finish on the version before it, in seconds, and what
    becomes of those that are left: "keep", "recompute" or "abort".
    """

    timeout: float
    fallback: str


class Pins:
    """At most one version is pinned at a time. Engine thread only, but for ``wait`` and ``told``.

    ``told``: how the last pins ended, or that they last; ``since``: the version that went live when
    they began, -1 where the models' last commit pinned none.
    """

    def __init__(
        self, scheduler: Scheduler, outputs: OutputProcessor, counters: EngineCounters
    ) -> None:
        self.told, self.since, self.count = "", -1, 0
        self._scheduler, self._outputs, self._counters = scheduler, outputs, counters
        self._terms = PinTerms(timeout=0.0, fallback="keep")
        self._began = 0.0
        self._ended: Future[None] = Future()
        self._ended.set_result(None)

    @property
    def version(self) -> int | None:
        """The pinned one; None: all runs on the live one."""
        return self._scheduler.pin

    def begin(self, sequences: Iterable[Sequence], live: int, terms: PinTerms) -> None:
        """At a commit, after which ``live`` is: these finish on the version before it."""
        version = self._scheduler.blocks.version
        self._scheduler.pin_to(version, sequences)
        self._terms, self._began, self.since = terms, time.monotonic(), live
        self.count = self._requests()
        self.told = (
            f"{self.count} requests finish on version {version}, for at most {terms.timeout:g} s, "
            f"then {terms.fallback}"
        )
        self._ended = Future()

    def refuse(self, asked: Iterable[Sequence], live: int, in_flight: str) -> None:
        """At a commit, after which ``live`` is and the version before it cannot run: ``asked``, who
        wanted that, go by ``in_flight``.
        """
        count = len({seq.request_id for seq in asked})
        self._counters.pin_fallbacks += count
        self.since = live
        self.told = (
            f"none: {count} requests asked for it, and went by in_flight={in_flight!r}, as two "
            "versions could not run"
        )

    def look(self) -> float | None:
        """Whether the pins have come to an end; seconds until they must, None where there are
        none.
        """
        if self.version is None:
            return None
        self.count = self._requests()
        left = self._began + self._terms.timeout - time.monotonic()
        if not self.count:
            self._end("all ended")
        elif left <= 0:
            self.end("at pin_timeout")
        else:
            return left
        return 0.0

    def end(self, why: str) -> None:
        """What is left takes its fallback; nothing to do where nothing is."""
        left, fallback = self._scheduler.pinned(), self._terms.fallback
        if left:
            self._counters.pin_fallbacks += len({seq.request_id for seq in left})
            begun = {seq.seq_id for seq in self._scheduler.begun()}
            for seq in left:
                if fallback == "recompute" or seq.seq_id not in begun:
                    seq.adapter = self._outputs.newest(seq)
            if fallback == "abort":
                self._outputs.abort({seq.request_id for seq in left})
            if fallback == "recompute":
                self._scheduler.recompute(left)
            count = len({seq.request_id for seq in left})
            self._end(f"{count} requests took the fallback {fallback!r} {why}")
        elif self.version is not None:
            self._end("all ended")

    def wait(self, seconds: float) -> bool:
        """From any thread: whether nothing is pinned any more, within so long."""
        try:
            self._ended.result(max(0.0, seconds))
        except FutureTimeout:
            return False
        return True

    def _end(self, how: str) -> None:
        took = time.monotonic() - self._began
        self.told = f"pinned to version {self.version} for {took:.3f} s: {how}"
        self.count = 0
        self._scheduler.unpin()
        self._scheduler.blocks.unpin()
        self._ended.set_result(None)

    def _requests(self) -> int:
        return len({seq.request_id for seq in self._scheduler.pinned()})
