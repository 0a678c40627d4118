"""All trainer ranks send: each its own boxes, read, digested and sent round by round."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from rollout.errors import SourceFailed
from rollout.kernels import nontemporal_copy
from rollout.weight_sync.protocol.digests import combine
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weight_sync.trainer.bucket_sender import Books, Shipment
from rollout.weight_sync.trainer.lockstep import Watchdog
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.session import Publication
from rollout.weight_sync.trainer.sources.base import LocalSource, WeightSource
from rollout.weight_sync.trainer.survey import PlanCache, Survey
from rollout.weight_sync.transports.p2p import P2PMember, outgoing, payload_bytes
from rollout.weights import Box, TensorMeta


class Rounds:
    """Collective over the source's ranks: they go from round to round together, or all fail.

    The first rank alone talks to the engine. By the vote of round i it knows that round i - 1 has
    arrived everywhere, so every rank may overwrite what it sent of it.
    """

    def __init__(
        self,
        source: WeightSource,
        survey: Survey,
        agreement: Agreement,
        options: UpdateOptions,
        sending: Publication,
        watch: Watchdog,
    ) -> None:
        self._agreement, self._timeout = agreement, options.timeout
        self._survey, self._sending = survey, sending
        self._bucket_bytes = options.bucket_bytes
        local = cast(LocalSource, source)
        self._held = HeldBoxes(local, survey, agreement.rank, sending.books, watch)

    def run(self, offer: Mapping[str, Any], plans: PlanCache) -> None:
        """Send everything; returns when it has arrived and all digests are known."""
        rounds = plans.rounds(self._survey, self._bucket_bytes)
        me, sending = self._agreement.rank, self._sending
        buffers = _buffers(rounds, me)
        with closing(P2PMember(offer, me)) as member:
            sender = sending.shipment or _Follower(member, self._timeout)
            self._together("connect", sender.connect)
            for header in rounds:
                self._together(
                    f"round {header.index}", partial(self._send, sender, header, buffers)
                )
            self._together("last round", sender.flush)
            self._together("digests", self._held.finish)
            status = {"digests": self._held.rows(), "sent": sender.sent_bytes}
            said = self._agreement.exchange(status, 2 * self._timeout, "digests")
        digests = combine([reply["digests"] for reply in said])
        sending.books.end(self._survey.metadata, digests, [reply["sent"] for reply in said])

    def _send(
        self, sender: Shipment | _Follower, header: BucketHeader, buffers: tuple[Tensor, Tensor]
    ) -> None:
        started = time.perf_counter()
        payload = self._held.pack(header, buffers[header.index % 2])
        self._sending.books.gather_seconds += time.perf_counter() - started
        sender.send_round(header, payload)

    def _together(self, phase: str, act: Callable[[], None]) -> None:
        """Run ``act`` here and vote; the first error of any rank is raised on all."""
        failure: Exception | None = None
        try:
            act()
        except Exception as error:  # noqa: BLE001 - the trainer's code runs in here, too
            failure = error
        if self._agreement.is_sender:
            failure = failure or self._sending.failure
        # The sender may itself wait for the engine's ranks until its deadline.
        self._agreement.vote(failure, 2 * self._timeout, phase)


class _Follower:
    """What ranks other than the first do."""

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


class HeldBoxes:
    """What this rank holds: packs parts of it, and digests each box when it is first read."""

    def __init__(
        self, source: LocalSource, survey: Survey, rank: int, books: Books, watch: Watchdog
    ) -> None:
        self._source, self._rank, self._books, self._watch = source, rank, books, watch
        self._boxes = survey.have[rank]
        self._metadata: Mapping[str, TensorMeta] = {m.name: m for m in survey.metadata}
        self._digests: dict[str, list[int]] = {}
        self._last: tuple[str, list[tuple[Box, Tensor]]] = ("", [])

    def pack(self, header: BucketHeader, into: Tensor) -> Tensor:
        """This rank's messages of one round, one after the other.

        A tensor is read once, however many engine ranks take of it: reading casts.
        """
        wanted: dict[str, list[tuple[BucketEntry, int]]] = {}
        for message, at in outgoing(header, self._rank):
            for entry in message.entries:
                where = at + entry.offset - message.start
                wanted.setdefault(entry.name, []).append((entry, where))
        for name in sorted(wanted, key=lambda name: name != self._last[0]):  # what is read, first
            for entry, start in wanted[name]:
                part = into[start : start + entry.nbytes]
                room = part.view(entry.dtype).view(entry.box.shape)
                nontemporal_copy(room, self._values(entry))
        return into[: payload_bytes(header, self._rank)]

    def finish(self) -> None:
        """Digest what no engine rank took."""
        for name in self._boxes:
            if name not in self._digests:
                self._read(name)

    def rows(self) -> list[list[Any]]:
        """Name, box and digest of every box of this rank, as they travel."""
        return [
            [name, list(box.starts), list(box.stops), value]
            for name, boxes in self._boxes.items()
            for box, value in zip(boxes, self._digests[name], strict=True)
        ]

    def _values(self, entry: BucketEntry) -> Tensor:
        for box, values in self._read(entry.name):
            if box.intersect(entry.box) == entry.box:
                return values[entry.box.shifted(tuple(-n for n in box.starts)).slices]
        raise SourceFailed(f"{entry.name}: the source no longer holds the boxes it announced")

    def _read(self, name: str) -> list[tuple[Box, Tensor]]:
        if self._last[0] == name:
            return self._last[1]
        meta = self._metadata[name]
        with self._watch.over(f"read {name}", self._last[0]):
            found = self._source.local_values(name)
        if tuple(box for box, _ in found) != tuple(self._boxes.get(name, ())) or any(
            tuple(values.shape) != box.shape or values.dtype != meta.dtype for box, values in found
        ):
            raise SourceFailed(f"{name}: the source no longer holds the boxes it announced")
        if name not in self._digests:
            self._digests[name] = [
                self._books.digest(name, values, meta.shape, box) for box, values in found
            ]
        self._last = (name, found)
        return found


def _buffers(rounds: tuple[BucketHeader, ...], rank: int) -> tuple[Tensor, Tensor]:
    """Two buffers in host memory, as long as this rank's longest part of a round."""
    size = max((payload_bytes(header, rank) for header in rounds), default=0)
    return torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
