"""How a trainer reaches an engine, and learns how an update ended whose last reply was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Annotated, Protocol

from msgspec import Meta

from rollout.errors import RolloutError
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.membership import MAX_AUTHORITIES
from rollout.weight_sync.protocol.messages import UpdateRequest, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.wire.codec import ADDED, Seconds, Text, from_plain

_POLL = 0.05  # seconds between questions


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOffer:
    """What the request of an update says of the stream that carries it.

    ``grace``: seconds for which the lease outlives a broken connection; 0 ends it at once.
    ``senders``: trainer ranks that each have a stream. ``shares``: what arrives is for the engine's
    neighbours, too, and is to lie in memory that they can map: ``Begun.shared``. ``relays``: it may
    come by a feed from another host (``Begun.feed``), and go on to the next (``Forward``).
    """

    grace: Seconds = 0.0
    senders: Annotated[int, Meta(ge=1)] = 1
    shares: bool = field(default=False, metadata=ADDED)
    relays: bool = field(default=False, metadata=ADDED)

    @classmethod
    def of(cls, request: UpdateRequest) -> StreamOffer:
        """What is said of it, or the defaults: other transports say nothing."""
        return from_plain(cls, dict(request.offer)) if "grace" in request.offer else cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """Take an update's buckets on to the engine at ``address`` ("host:port"), as they come.

    ``secret``: the ``Begun.feed`` of its own part of the update. The others are as ``SendTo``'s.
    """

    address: Text
    token: Text = ""
    tls_ca: Annotated[str, Meta(max_length=MAX_AUTHORITIES)] = ""
    tls_server_name: Text = ""
    update_id: Text
    secret: Text
    timeout: Seconds


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


class LinkOver:
    """``WeightLink`` that is ``link``, but for what a subclass does in a way of its own."""

    def __init__(self, link: WeightLink) -> None:
        self._link, self.joins = link, link.joins

    @property
    def local_address(self) -> str:
        return self._link.local_address

    def info(self) -> WeightInfo:
        return self._link.info()

    def open(self) -> WeightChannel:
        return self._link.open()

    def join(self, request: UpdateRequest, secret: str, lane: int) -> WeightChannel:
        return self._link.join(request, secret, lane)

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        return self._link.receipts()


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
