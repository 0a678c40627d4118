"""Boxes sent by the trainer ranks that have them, straight to the engine ranks that want them.

One gloo group over all of them: ranks 0 .. W-1 are the trainer's, W .. W+TP-1 the engine's. The
sender announces a round to the engine's ranks; every rank posts all its messages of that round
before it waits for one. A tag says which round a message is of, and both ends know its length
from the same plan, so that no message can be longer than its receive, which gloo punishes with
the end of the process. The group lives as long as one update.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rollout.distributed import LOOPBACK, Rendezvous, RendezvousServer, join_group
from rollout.errors import DeadlineExceeded, RolloutError, TransferFailed
from rollout.updates import BucketHeader, Message, SharedBuckets, WeightChannel, WeightInfo
from rollout.weight_sync.bucket import ALIGNMENT
from rollout.weight_sync.transports.group import drop, explained

_TAGS = 1 << 30


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
    """One trainer rank's place in the group; used by one thread."""

    def __init__(self, where: Rendezvous, rank: int, senders: int) -> None:
        self._where, self._rank, self._senders = where, rank, senders
        self._group: Any = None
        self._posted: dict[int, list[tuple[Any, Tensor]]] = {}
        self.sent_bytes = 0

    def connect(self, timeout: float) -> None:
        """Meet all members, collectively."""
        self._group = join_group(self._where, self._rank, timeout)

    def post(self, header: BucketHeader, payload: Tensor) -> None:
        """Start sending this rank's part of a round, uint8 [payload_bytes]; see ``free``."""
        posted = self._posted.setdefault(header.index, [])
        for message, at in outgoing(header, self._rank):
            part = payload[at : at + message.nbytes]
            try:
                work = self._group.send([part], self._senders + message.dst, _tag(header.index))
            except RuntimeError as error:
                raise self._broken(header.index, error) from error
            posted.append((work, part))
            self.sent_bytes += message.nbytes

    def free(self, index: int) -> None:
        """Until round ``index`` has left this rank, so that its payload may be overwritten."""
        for work, _ in self._posted.pop(index, ()):
            try:
                work.wait()
            except RuntimeError as error:
                raise self._broken(index, error) from error

    def close(self) -> None:
        held, self._group = [self._group, self._posted], None
        self._posted = {}
        drop(held)

    def _broken(self, index: int, error: RuntimeError) -> TransferFailed:
        return TransferFailed(
            f"trainer rank {self._rank}: a link to the engine's ranks broke at round {index}: "
            f"{error}"
        )


class P2PSender:
    """The first trainer rank's end: listens for all members, announces, and sends its own boxes.

    What all trainer ranks do together is in ``rollout.weight_sync.rounds``.
    """

    name = "p2p"

    def __init__(self, info: WeightInfo, timeout: float, host: str = LOOPBACK) -> None:
        self._engine_ranks, self._timeout, self._host = info.tensor_parallel_size, timeout, host
        self._server: RendezvousServer | None = None
        self._member: P2PMember | None = None

    def spread(self, ranks: int) -> None:
        size = ranks + self._engine_ranks
        self._server = RendezvousServer(size, "gloo", self._host, self._timeout)
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
        self.member.post(header, payload)

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        # The channel knows of a rank's error first; the group would only time out.
        channel.wait(index, timeout)
        with explained(channel, index):
            self.member.free(index)

    def close(self) -> None:
        if self._member is not None:
            self._member.close()
        if self._server is not None:
            self._server.close()


class P2PReceiver:
    """An engine rank's place in the group: receives its part of a round from several ranks."""

    def __init__(self, where: Rendezvous, senders: int, rank: int, bucket_bytes: int) -> None:
        self._where, self._senders, self._rank = where, senders, rank
        self._limit = bucket_bytes
        self._group: Any = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._ends: queue.SimpleQueue[RolloutError | int] = queue.SimpleQueue()

    def connect(self, timeout: float) -> None:
        self._group = join_group(self._where, self._senders + self._rank, timeout)

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        self._check(header)
        if self._buffer.numel() < header.nbytes:
            self._buffer = torch.empty(header.nbytes, dtype=torch.uint8)
        into, index = self._buffer[: header.nbytes], header.index
        if not header.messages:
            return into
        try:
            posted = [
                (m, self._group.recv([into[m.start : m.stop]], m.src, _tag(index)))
                for m in header.messages
            ]
        except (RuntimeError, AttributeError) as error:  # no group: closed meanwhile
            raise TransferFailed(f"rank {self._rank}: aborted before round {index}") from error
        # Waited for beside this thread, so that an abort frees it at once.
        waiting = threading.Thread(
            target=self._wait_for, args=(index, posted, into), name="p2p-receive", daemon=True
        )
        waiting.start()
        while True:
            try:
                end = self._ends.get(timeout=timeout)
            except queue.Empty:
                raise self._late(index, timeout) from None
            if isinstance(end, RolloutError):
                raise end
            if end == index:
                return into

    def close(self) -> None:
        self._ends.put(TransferFailed(f"rank {self._rank}: aborted while receiving (phase: round)"))
        held, self._group = [self._group], None
        drop(held)

    def _wait_for(self, index: int, posted: list[tuple[Message, Any]], into: Tensor) -> None:
        """Runs in a thread of its own; ``into`` is held until gloo writes to it no more."""
        for message, work in posted:
            try:
                work.wait()
            except RuntimeError as error:
                late = "timed out" in str(error).lower()
                self._ends.put(
                    self._late(index, None, message.src)
                    if late
                    else TransferFailed(
                        f"rank {self._rank}: the link to trainer rank {message.src} broke at "
                        f"round {index}: {error}"
                    )
                )
                return
        self._ends.put(index)

    def _late(self, index: int, timeout: float | None, src: int | None = None) -> DeadlineExceeded:
        who = "a trainer rank's part" if src is None else f"trainer rank {src}'s part"
        within = "the deadline" if timeout is None else f"{timeout:g} s"
        return DeadlineExceeded(
            f"rank {self._rank}: {who} of bucket {index} was announced but did not arrive within "
            f"{within} (phase: transfer)"
        )

    def _check(self, header: BucketHeader) -> None:
        """Lengths and ranks that were agreed on, before memory is made or a receive posted."""
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


def _tag(index: int) -> int:
    return 1 + index % _TAGS
