"""Boxes sent by the trainer ranks that have them, straight to the engine ranks that want them.

Ranks 0 .. W-1 are the trainer's, W .. W+TP-1 the engine's; each engine rank has a link to each of
the trainer's (``links``) for as long as one update lasts. The sender announces a round to the
engine's ranks; every trainer rank posts all its messages of that round before it waits for one, and
both ends know their order and lengths from the same plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from rollout.distributed import LOOPBACK, Rendezvous, RendezvousServer
from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.bucket import ALIGNMENT
from rollout.weight_sync.protocol.messages import (
    BucketHeader,
    Message,
    SharedBuckets,
    WeightChannel,
    WeightInfo,
)
from rollout.weight_sync.transports.group import explained
from rollout.weight_sync.transports.links import Links


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


class P2PMember:
    """One trainer rank's links to the engine's ranks; used by one thread."""

    def __init__(self, where: Rendezvous, rank: int, senders: int) -> None:
        self._rank, self._senders = rank, senders
        self._links = Links(where, rank, senders)
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


class P2PSender:
    """The first trainer rank's end: listens for all members, announces, and sends its own boxes.

    What all trainer ranks do together is in ``rollout.weight_sync.trainer.reshard``.
    """

    name = "p2p"

    def __init__(self, info: WeightInfo, timeout: float, host: str = LOOPBACK) -> None:
        self._engine_ranks, self._host = info.tensor_parallel_size, host
        self._server: RendezvousServer | None = None
        self._member: P2PMember | None = None

    def spread(self, ranks: int) -> None:
        size = ranks + self._engine_ranks
        self._server = RendezvousServer(size, "tcp", self._host)
        self._member = P2PMember(self._server.info, 0, ranks)

    def buffers(self, bucket_bytes: int) -> tuple[Tensor, ...]:
        return ()

    def rendezvous(self) -> Rendezvous | None:
        return None if self._server is None else self._server.info

    def shared(self) -> SharedBuckets | None:
        return None

    @property
    def sent_bytes(self) -> int:
        return self.member.sent_bytes

    @property
    def member(self) -> P2PMember:
        assert self._member is not None, "spread comes first"
        return self._member

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        with explained(channel):
            self.member.connect(timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        channel.bucket(header, None)
        with explained(channel, header.index):
            self.member.post(header, payload)

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        # The channel knows of a rank's error first; the link would only time out.
        channel.wait(index, timeout)
        with explained(channel, index):
            self.member.free(index, timeout)

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
        if self._server is not None:
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
