"""Where the time of a step goes in the engine, around its ranks (see ``worker/profile.py``)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, cast

import rollout.engine.loop as loop_module
from rollout.engine.sequence import ScheduledBatch
from rollout.engine.tokenizer import Detokenizer
from rollout.engine.worker.profile import DECODE, PREFILL, KindTotals, Spans, Watched

if TYPE_CHECKING:
    from rollout.engine.core import EngineCore


class EngineProfile:
    """Measures an engine's loop and its ranks from ``start`` to ``stop``; nothing else may run.

    Spans of a step: "schedule", "build" (its arrays), "book" (tokens to their sequences and text),
    "publish" (snapshots to callers) and, in each of these, "detokenise"; the rest of a step is
    the ranks' and the way to them.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._spans, self._totals, self._watched = Spans(), KindTotals(), Watched()
        self._kind: str | None = None  # of the step that is not yet published

    def start(self, timeout: float) -> None:
        self._ask("profile", {"on": True}, timeout)
        self._core.at_step_boundary(self._replace).result(timeout)

    def stop(self, timeout: float) -> dict[str, Any]:
        """``engine`` and each of ``ranks``: figures by kind of step; ``read``: bytes a second."""
        self._core.at_step_boundary(self._watched.close).result(timeout)
        replies = self._ask("profile", {"on": False}, timeout)
        speeds = self._ask("read_speed", {}, timeout)
        return {
            "engine": self._totals.figures,
            "ranks": [reply["kinds"] for reply in replies],
            "read": [reply["bytes_per_second"] for reply in speeds],
        }

    def _ask(self, method: str, args: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Every rank's reply; one in this process answers in the thread that runs its steps."""
        futures = self._core.at_step_boundary(lambda: self._core.call(method, args))
        return [future.result(timeout)[0] for future in futures.result(timeout)]

    def _replace(self) -> None:
        loop, timed, replace = self._core.loop, self._spans.timed, self._watched.replace
        self._spans.thread = threading.get_ident()
        replace(loop, "runs_ahead", lambda _: cast(Any, False))  # a step's parts follow one another
        replace(loop, "_step", lambda run: timed("step", run))
        replace(self._core.scheduler, "schedule", lambda run: timed("schedule", self._look(run)))
        replace(loop_module, "encode_batch", lambda run: timed("build", run))
        replace(self._core.outputs, "step", lambda run: timed("book", run))
        replace(self._core.outputs, "publish", lambda run: self._fold(timed("publish", run)))
        replace(Detokenizer, "feed", lambda run: timed("detokenise", run))

    def _look(self, schedule: Any) -> Any:
        def look() -> ScheduledBatch:
            batch: ScheduledBatch = schedule()
            decoding = all(entry.num_new == 1 for entry in batch.entries)
            self._kind = (DECODE if decoding else PREFILL) if batch.entries else None
            return batch

        return look

    def _fold(self, publish: Any) -> Any:
        """The end of a step is its first publishing; others found nothing to do."""

        def fold() -> None:
            publish()
            spans = self._spans.take()
            if self._kind is not None:
                self._totals.add(self._kind, spans)
            self._kind = None

        return fold
