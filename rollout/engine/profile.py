"""Where the time of a step goes in the engine, around its ranks (see ``worker/profile.py``)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rollout.engine.sequences.sequence import ScheduledBatch
from rollout.engine.tokenizer import Detokenizer
from rollout.engine.worker.profile import DECODE, PREFILL, Spans

if TYPE_CHECKING:
    from rollout.engine.core import EngineCore


class EngineProfile:
    """Measures an engine's loop and its ranks from ``start`` to ``stop``; nothing else may run.

    Spans of a step: "schedule", "build" (its arrays), "book" (tokens to their sequences and text),
    "publish" (snapshots to callers) and, in each of these, "detokenise"; the rest of a step is
    the ranks' and the way to them.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core, self._spans = core, Spans()
        self._kind: str | None = None  # of the step that is not yet published

    def start(self, timeout: float) -> None:
        self._ask("profile", {"on": True}, timeout)
        self._core.at_step_boundary(self._watch).result(timeout)

    def stop(self, timeout: float) -> dict[str, Any]:
        """``engine`` and each of ``ranks``: figures by kind of step; ``read``: bytes a second."""
        self._core.at_step_boundary(self._spans.restore).result(timeout)
        replies = self._ask("profile", {"on": False}, timeout)
        speeds = self._ask("read_speed", {}, timeout)
        return {
            "engine": self._spans.figures,
            "ranks": [reply["kinds"] for reply in replies],
            "read": [reply["bytes_per_second"] for reply in speeds],
        }

    def _ask(self, method: str, args: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
        """Every rank's reply; one in this process answers in the thread that runs its steps."""
        futures = self._core.at_step_boundary(lambda: self._core.call(method, args))
        return [future.result(timeout)[0] for future in futures.result(timeout)]

    def _watch(self) -> None:
        core, spans = self._core, self._spans
        spans.thread = threading.get_ident()
        spans.replace(core.loop, "runs_ahead", False)  # a step's parts follow one another
        spans.time(core.loop, "_step", "step")
        spans.replace(core.scheduler, "schedule", self._look(core.scheduler.schedule))
        spans.time(core.loop.encoder, "encode", "build")
        spans.time(core.outputs, "step", "book")
        spans.replace(core.outputs, "publish", self._end(core.outputs.publish))
        spans.time(Detokenizer, "feed", "detokenise")

    def _look(self, schedule: Any) -> Any:
        timed = self._spans.timed("schedule", schedule)

        def look() -> ScheduledBatch:
            batch: ScheduledBatch = timed()
            decoding = all(entry.num_new == 1 for entry in batch.entries)
            self._kind = (DECODE if decoding else PREFILL) if batch.entries else None
            return batch

        return look

    def _end(self, publish: Any) -> Any:
        """The end of a step is its first publishing; others found nothing to do."""
        timed = self._spans.timed("publish", publish)

        def end() -> None:
            timed()
            self._spans.end_step(self._kind)
            self._kind = None

        return end
