"""All trainer ranks send: each its own boxes, read, digested and sent round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.errors import SourceFailed
from rollout.kernels import nontemporal_copy
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weight_sync.trainer.bucket_sender import BucketSender
from rollout.weight_sync.trainer.local_shards import LocalBoxes
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.trainer.watchdog import Watchdog
from rollout.weight_sync.transports.p2p import P2PMember, outgoing, payload_bytes
from rollout.weights import Box


class BoxRounds:
    """What trainer ranks do who each bring their own boxes: they go from round to round together,
    or all fail.

    ``first``: the first rank's way to the engine, None on the others.
    """

    def run(self, rounds: tuple[BucketHeader, ...], meet: Mapping[str, Any]) -> None:
        """All of them; ``meet``: as the ``UpdatePlan`` has it."""
        raise NotImplementedError

    def __init__(
        self,
        boxes: LocalBoxes,
        group: RankGroup,
        first: BucketSender | None,
        stats: TransferStats,
        timeout: float,
        watch: Watchdog,
    ) -> None:
        self._boxes, self._group, self._first = boxes, group, first
        self._stats, self._timeout, self._watch = stats, timeout, watch

    def together(self, phase: str, act: Callable[[], Mapping[str, Any] | None]) -> list[Any]:
        """Run ``act`` here and vote; the first error of any rank is raised on all.

        What each member's returned (JSON-able), in their order.
        """
        failure: Exception | None = None
        said: Mapping[str, Any] | None = None
        try:
            said = act()
        except Exception as error:  # noqa: BLE001 - the trainer's code runs in here, too
            failure = error
        if self._first is not None:
            failure = failure or self._first.failure
        # The first rank may itself wait for the engine's ranks until its deadline.
        return self._group.vote(failure, 2 * self._timeout, phase, said)

    def write(self, wanted: Mapping[str, Sequence[tuple[BucketEntry, int]]], into: Tensor) -> None:
        """Copy this rank's entries, by tensor, to where each lies in ``into``, uint8, and digest
        them.

        A tensor is read once, however many entries are of it: reading casts.
        """
        for name in sorted(wanted, key=lambda name: not self._boxes.has_read(name)):
            place(self._boxes.digest(name, self._stats, self._watch), wanted[name], into)

    def flush(self) -> None:
        """On the first rank: until every engine rank has taken every bucket."""
        if self._first is not None:
            self._first.flush()

    def digest_held(self, boxes: Mapping[tuple[str, Box], Tensor]) -> None:
        """Those of (name, box) that have not been, all at once; on one device."""
        left = {at: values for at, values in boxes.items() if at not in self._stats.digests}
        if left:
            self._stats.digest_boxes(left, self._boxes.metadata)

    def digest_rest(self) -> None:
        """Of the boxes that no entry was of."""
        self._boxes.digest_all(self._stats, self._watch)


class BoxSending(BoxRounds):
    """Collective over the source's ranks: each sends its boxes right to the engine's ranks.

    By the vote of round i the first rank knows that round i - 1 has arrived everywhere, so every
    rank may overwrite what it sent of it.
    """

    def run(self, rounds: tuple[BucketHeader, ...], meet: Mapping[str, Any]) -> None:
        """Send everything; returns when it has arrived and all boxes are digested."""
        rank = self._group.rank
        buffers = _buffers(rounds, rank)
        with ExitStack() as stack:
            sender: BucketSender | _Follower
            if self._first is not None:
                sender = self._first
            else:
                member = P2PMember(meet["offer"], rank)
                sender = _Follower(stack.enter_context(closing(member)), self._timeout)
            self.together("connect", sender.connect)
            for header in rounds:
                buffer = buffers[header.index % 2]
                self.together(f"round {header.index}", partial(self._send, sender, header, buffer))
            self.together("last round", sender.flush)
            self.together("digests", self.digest_rest)
            self._stats.wire_bytes = sender.sent_bytes

    def _send(self, sender: BucketSender | _Follower, header: BucketHeader, into: Tensor) -> None:
        started = time.perf_counter()
        payload = self._pack(header, into)
        self._stats.gather_seconds += time.perf_counter() - started
        sender.send_round(header, payload)

    def _pack(self, header: BucketHeader, into: Tensor) -> Tensor:
        """This rank's messages of one round, one after the other."""
        wanted: dict[str, list[tuple[BucketEntry, int]]] = {}
        for message, at in outgoing(header, self._group.rank):
            for entry in message.entries:
                where = at + entry.offset - message.start
                wanted.setdefault(entry.name, []).append((entry, where))
        self.write(wanted, into)
        return into[: payload_bytes(header, self._group.rank)]


class _Follower:
    """What ranks other than the first do, with links of their own to the engine's ranks."""

    def __init__(self, member: P2PMember, timeout: float) -> None:
        self._member, self._timeout = member, timeout

    @property
    def sent_bytes(self) -> int:
        return self._member.sent_bytes

    def connect(self) -> None:
        self._member.connect(self._timeout)

    def send_round(self, header: BucketHeader, payload: Tensor) -> None:
        # The round before the last has arrived, says the last vote: this does not wait.
        self._member.free(header.index - 2, self._timeout)
        self._member.post(header, payload)

    def flush(self) -> None:
        return None  # the first rank knows when the last round has arrived


def place(
    held: Mapping[Box, Tensor], entries: Sequence[tuple[BucketEntry, int]], into: Tensor
) -> None:
    """Copy entries of a tensor, of which ``held`` are boxes, to where each lies in ``into``."""
    for entry, start in entries:
        buffer = into[start : start + entry.nbytes].view(entry.dtype).view(entry.box.shape)
        nontemporal_copy(buffer, within(held, entry)[1])


def within(held: Mapping[Box, Tensor], entry: BucketEntry) -> tuple[Box, Tensor]:
    """The box that an entry is of, and the entry's values in that."""
    if (whole := held.get(entry.box)) is not None:
        return entry.box, whole
    for box, values in held.items():
        if box.intersect(entry.box) == entry.box:
            return box, values[entry.box.shifted(tuple(-n for n in box.starts)).slices]
    raise SourceFailed(f"{entry.name}: the source no longer holds the boxes it announced")


def _buffers(rounds: tuple[BucketHeader, ...], rank: int) -> tuple[Tensor, Tensor]:
    """Two buffers in host memory, as long as this rank's longest part of a round."""
    size = max((payload_bytes(header, rank) for header in rounds), default=0)
    return torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
