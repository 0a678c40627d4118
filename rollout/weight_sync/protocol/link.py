"""How a trainer reaches an engine, and learns how an update ended whose last reply was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from rollout.errors import RolloutError
from rollout.weight_sync.protocol.messages import (
    UpdateReceipt,
    UpdateRequest,
    WeightChannel,
    WeightInfo,
)
from rollout.wire.checked import int_of, seconds_of

_POLL = 0.05  # seconds between questions


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffer:
    """What the request of an update says of the stream that carries it.

    ``grace``: seconds for which the lease outlives a broken connection; 0 ends it at once.
    ``senders``: trainer ranks that each have a stream.
    """

    grace: float = 0.0
    senders: int = 1

    @classmethod
    def of(cls, request: UpdateRequest) -> StreamOffer:
        """Types are checked, bounds are the transport's."""
        offer = request.offer
        return cls(
            grace=seconds_of(offer.get("grace", 0.0), "offer: grace"),
            senders=int_of(offer.get("senders", 1), "offer: senders", 1),
        )


class WeightLink(Protocol):
    """How a trainer reaches an engine: in process, or ``RolloutClient``.

    ``joins``: whether several streams can carry one update.
    """

    joins: bool

    def info(self) -> WeightInfo: ...

    def open(self) -> WeightChannel: ...

    def join(self, request: UpdateRequest, secret: str, lane: int) -> WeightChannel:
        """One more stream of an update that another rank has begun, where the link ``joins``."""
        ...

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
