"""The updates of a fleet that have ended: the last receipts, and how many failed."""

from __future__ import annotations

from collections import deque
from typing import Any

from rollout.generation.metrics import NOT_BEGUN, EngineCounters
from rollout.weight_sync.protocol.receipts import UpdateReceipt

KEPT_RECEIPTS = 64


class UpdateLog:
    """Each counts once, however many members took part. Written by the threads of updates."""

    def __init__(self) -> None:
        self.counters = EngineCounters()
        self._receipts: deque[UpdateReceipt] = deque(maxlen=KEPT_RECEIPTS)

    def committed(self, receipt: UpdateReceipt) -> None:
        self._receipts.append(receipt)
        self.counters.updates += 1

    def failed(self, update_id: str, reason: str) -> None:
        """``update_id``: "" for one that had not begun."""
        self.counters.record_failed_update(update_id or NOT_BEGUN, reason)

    @property
    def receipts(self) -> tuple[UpdateReceipt, ...]:
        """Oldest first."""
        return tuple(self._receipts)

    def figures(self) -> dict[str, Any]:
        """Fields of ``EngineStats``."""
        names = (
            "weight_updates_total", "weight_updates_failed_total", "weight_update_errors",
            "following", "follow_error", "follow_failures_total",
        )  # fmt: skip
        found = self.counters.snapshot()
        return {name: found[name] for name in names}
