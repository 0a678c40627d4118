"""How a trainer reaches an engine, and learns how an update ended whose last reply was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rollout.errors import RolloutError
from rollout.weight_sync.protocol.messages import UpdateReceipt, WeightChannel, WeightInfo

_POLL = 0.05  # seconds between questions


class WeightLink(Protocol):
    """How a trainer reaches an engine: in process, or ``RolloutClient``."""

    def info(self) -> WeightInfo: ...

    def open(self) -> WeightChannel: ...

    def receipts(self) -> tuple[UpdateReceipt, ...]: ...

    @property
    def local_address(self) -> str:
        """The address of this machine as the engine reaches it."""
        ...


def receipt_of(
    connect: Callable[[], WeightLink], update_id: str, lost: RolloutError, timeout: float
) -> UpdateReceipt:
    """What became of a commit whose reply was lost; raises ``lost`` where it did not commit."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            link = connect()
            state = link.info().state
            ours = [r for r in link.receipts() if r.update_id == update_id]
        except RolloutError:
            raise lost from None
        if ours:
            why = "the commit's reply was lost; the engine's own receipt was asked for"
            return replace(ours[0], details={**ours[0].details, "recovered": why})
        if state not in ("staged", "committing") or time.monotonic() > deadline:
            raise lost
        time.sleep(_POLL)
