"""Boxes sent by the trainer ranks that have them, straight to the engine ranks that want them.

Ranks 0 .. W-1 are the trainer's, W .. W+TP-1 the engine's; each engine rank has a link to each of
the trainer's (``links``) for as long as one update lasts. The sender announces a round to the
engine's ranks; every trainer rank posts all its messages of that round before it waits for one, and
both ends know their order and lengths from the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from msgspec import Meta
from torch import Tensor

from rollout.distributed import Rendezvous, RendezvousServer
from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.bucket import ALIGNMENT
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import BucketHeader, Message, UpdateRequest, WeightInfo
from rollout.weight_sync.transports.base import (
    Accepted,
    EngineRank,
    Holding,
    Opening,
    Receiver,
    Sender,
    Transport,
    offer_of,
)
from rollout.weight_sync.transports.group import check_group, explained
from rollout.weight_sync.transports.links import Links
from rollout.wire.codec import Text, from_plain, to_plain

MAX_SENDERS = 1 << 16


def outgoing(header: BucketHeader, src: int) -> Iterator[tuple[Message, int]]:
    """The messages of trainer rank ``src`` in one round, and where each lies in its payload."""
    end = 0
    for message in header.messages:
        if message.src == src:
            yield message, end
            end += -(-message.nbytes // ALIGNMENT) * ALIGNMENT


def payload_bytes(header: BucketHeader, src: int) -> int:
    """The length of that payload."""
    return max((at + message.nbytes for message, at in outgoing(header, src)), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class P2POffer:
    """Where all meet, of whom the first ``senders`` are the trainer's.

    ``known``: digest of the engine's requested boxes that the sender remembers.
    """

    rendezvous: Rendezvous
    senders: Annotated[int, Meta(ge=1, le=MAX_SENDERS)]
    known: Text


class P2P(Transport):
    name = "p2p"
    senders = "all"

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        if holding is None or holding.problem is not None or not holding.split:
            return None
        if holding.not_mapped is None:
            return None  # they need not even be sent
        why = f"; not mapped: {holding.not_mapped}" if holding.not_mapped else ""
        return f"the weights are split among trainer ranks, and need no gather{why}"

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return "not looked into" if holding is None else holding.problem

    def open(self, opening: Opening) -> Sender:
        return P2PSender(opening)

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        said = offer_of(P2POffer, request)
        check_group(said.rendezvous, said.senders, num_ranks, device)
        return Accepted(senders=said.senders, known=said.known)

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        said = offer_of(P2POffer, request)
        return P2PReceiver(said.rendezvous, said.senders, at.rank, request.bucket_bytes)


class P2PMember:
    """One trainer rank's links to the engine's ranks; used by one thread."""

    def __init__(self, offer: Mapping[str, Any], rank: int) -> None:
        """``offer``: the first rank's."""
        said = from_plain(P2POffer, offer)
        self._rank, self._senders = rank, said.senders
        self._links = Links(said.rendezvous, rank, said.senders)
        self.sent_bytes = 0

    def connect(self, timeout: float) -> None:
        """Meet the engine's ranks, collectively."""
        self._links.connect(timeout)

    def post(self, header: BucketHeader, payload: Tensor) -> None:
        """Start sending this rank's part of a round, uint8 [payload_bytes]; see ``free``."""
        for message, at in outgoing(header, self._rank):
            part = payload[at : at + message.nbytes]
            self._links.post(header.index, self._senders + message.dst, part)
            self.sent_bytes += message.nbytes

    def free(self, index: int, timeout: float) -> None:
        """Until round ``index`` has left this rank, so that its payload may be overwritten."""
        self._links.wait(index, timeout)

    def close(self) -> None:
        self._links.close()


class P2PSender(Sender):
    """The first trainer rank's end: listens for all members, announces, and sends its own boxes.

    What all trainer ranks do together is in ``rollout.weight_sync.trainer.reshard``.
    """

    def __init__(self, opening: Opening) -> None:
        size = opening.senders + opening.info.num_ranks
        self._server = RendezvousServer(size, "tcp", opening.host)
        where = self._server.info
        offer = P2POffer(rendezvous=where, senders=opening.senders, known=opening.known)
        self.offer = to_plain(offer)
        self._member = P2PMember(self.offer, 0)

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        with explained(channel):
            self._member.connect(timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        channel.bucket(header, None)
        with explained(channel, header.index):
            self._member.post(header, payload)
        self.sent_bytes = self._member.sent_bytes

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        # The channel knows of a rank's error first; the link would only time out.
        channel.wait(index, timeout)
        with explained(channel, index):
            self._member.free(index, timeout)

    def close(self) -> None:
        self._member.close()
        self._server.close()


class P2PReceiver:
    """An engine rank's links to the trainer's ranks: receives its part of a round from several."""

    def __init__(self, where: Rendezvous, senders: int, rank: int, bucket_bytes: int) -> None:
        self._senders, self._rank, self._limit = senders, rank, bucket_bytes
        self._links = Links(where, senders + rank, senders)
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def connect(self, timeout: float) -> None:
        self._links.connect(timeout)

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        self._check(header)
        if self._buffer.numel() < header.nbytes:
            self._buffer = torch.empty(header.nbytes, dtype=torch.uint8)
        into, deadline = self._buffer[: header.nbytes], time.monotonic() + timeout
        for message in header.messages:
            left = deadline - time.monotonic()
            part = into[message.start : message.stop]
            self._links.receive(header.index, message.src, part, left)
        return into

    def close(self) -> None:
        self._links.close()

    def _check(self, header: BucketHeader) -> None:
        """Lengths and ranks that were agreed on, before memory is made or a byte is read."""
        end = 0
        for m in header.messages:
            if not end <= m.start <= m.stop <= header.nbytes or m.src >= self._senders:
                raise TransferFailed(
                    f"rank {self._rank}: round {header.index} has a message of bytes {m.start} to "
                    f"{m.stop} from trainer rank {m.src}, which does not fit it"
                )
            end = m.stop
        if header.nbytes > self._limit:
            raise TransferFailed(
                f"rank {self._rank}: round {header.index} of {header.nbytes} bytes is over the "
                f"agreed {self._limit}"
            )
