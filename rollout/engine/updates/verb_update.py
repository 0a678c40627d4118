"""One update by verbs: what a framework's trainer broadcasts, wherever it goes on to."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from rollout.errors import WeightMismatch, some
from rollout.weight_sync.protocol.bucket import ALIGNMENT
from rollout.weight_sync.protocol.fit import check_metadata, differences
from rollout.weight_sync.protocol.messages import MAX_BUCKET_BYTES, BucketEntry, BucketHeader
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports.foreign_group import ForeignGroup
from rollout.weights import Box, TensorMeta
from rollout.weights.names import file_form, is_weight, placed
from rollout.weights.wanted import WantedWeights

PACK_BYTES = 1 << 30  # vLLM's own
GRACE = 2.0  # seconds a rank's own deadline comes before ours


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How tensors follow each other: each as one broadcast, or packed until over ``nbytes``."""

    packed: bool = False
    nbytes: int = PACK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Of an update: its caller's id for it ("": none), the seconds of each wait in it and between
    two verbs, and whether it commits by itself once it is complete.
    """

    update_id: str
    timeout: float
    deadline: float
    in_flight: str
    implicit: bool


class VerbUpdate(ABC):
    """One update under way, and what has come of it."""

    def __init__(self, wanted: WantedWeights, update_id: str, version: int, terms: Terms) -> None:
        self._wanted = replace(wanted, schemes={})  # codes come by no verb
        self.update_id, self.version = update_id, version
        self._timeout, self.deadline, self.implicit = terms.timeout, terms.deadline, terms.implicit
        self.label: str | None = None
        self.timer = threading.Timer(self.deadline, lambda: None)  # not started: see ``_watch``
        self.began = time.monotonic()
        self._sent: list[TensorMeta] = []
        self.calls = self._num_buckets = self._nbytes = 0

    def receive(self, tensors: Sequence[TensorMeta], packing: Packing) -> int:
        """Take the broadcasts of ``tensors``, in order; returns their bytes.

        Raises ``WeightMismatch`` before anything is received that does not fit. What is none of the
        model's weights is received, since the trainer sends it, and dropped.
        """
        tensors = [TensorMeta(file_form(m.name), m.dtype, m.shape) for m in tensors]
        wanted = self._wanted
        sent, dropped = [*self._sent], set()
        for meta in tensors:
            name = placed(meta.name, wanted.prefixes)
            if name is not None and is_weight(name):
                sent.append(TensorMeta(name, meta.dtype, meta.shape))
            else:
                dropped.add(meta.name)
        check_metadata(sent, wanted, partial=True)
        headers = list(_headers(tensors, packing, self._num_buckets))
        _check_dropped(headers, dropped)
        self._sent = sent
        self._take(headers)
        received = sum(meta.nbytes for meta in tensors)
        self._nbytes += received
        self.calls += 1
        return received

    def is_complete(self) -> bool:
        return not self.missing()

    def missing(self) -> Sequence[str]:
        """What the tensors sent so far lack, a line each."""
        return differences(self._sent, self._wanted)

    def unsent_aliases(self) -> frozenset[str]:
        """Names of other tensors that were not sent so far, in file form."""
        return frozenset(self._wanted.aliases) - {meta.name for meta in self._sent}

    @abstractmethod
    def _take(self, headers: Sequence[BucketHeader]) -> None:
        """Receive one broadcast for each, and count them in ``_num_buckets``."""

    @abstractmethod
    def confirm(self) -> None:
        """End it without a commit, once its aliases have been found equal to what is live."""

    @abstractmethod
    def commit(self, label: str | None) -> UpdateReceipt: ...

    @abstractmethod
    def abort(self, reason: str) -> bool:
        """Give it up; False where its commit has begun. Never raises."""


class Places(Protocol):
    """Those that an engine's ranks, or a front, take in groups of trainers; each under an id."""

    @property
    def count(self) -> int:
        """How many are taken in each group."""
        ...

    def join(self, place: str, group: ForeignGroup, timeout: float) -> None: ...

    def use(self, place: str) -> None:
        """The next broadcasts come over this one."""
        ...

    def are_alive(self, place: str, timeout: float) -> bool:
        """Whether all are in the group, and the trainer that leads it still there."""
        ...

    def leave(self, place: str) -> None: ...


class VerbTarget(Protocol):
    """What weight verbs act on: one engine, or a fleet."""

    @property
    def places(self) -> Places: ...

    @property
    def version(self) -> int:
        """Of the base that is live."""
        ...

    def committed(self, update_id: str) -> UpdateReceipt | None:
        """Of an update that is over; ``VersionConflict`` where it did not commit."""
        ...

    def begin(self, terms: Terms, *, partial: bool) -> VerbUpdate:
        """``partial``: of aliases alone, to be confirmed."""
        ...

    def give_up_prepared(self, update_id: str, reason: str) -> bool:
        """Whether it waits for a decision; then, by an operator's word, it is over."""
        ...

    def relabel(self, label: str) -> None:
        """Set the label of the live version; ``ConfigError`` where that cannot be."""
        ...


def _check_dropped(headers: Sequence[BucketHeader], dropped: Collection[str]) -> None:
    """Nothing says what shape they have: memory for any size would be asked for."""
    for header in headers:
        entries = [entry for entry in header.entries if entry.name in dropped]
        if (nbytes := sum(entry.nbytes for entry in entries)) > MAX_BUCKET_BYTES:
            names = some([entry.name for entry in entries], 4)
            raise WeightMismatch(
                f"{names}: {nbytes} bytes in one broadcast that are no weights of the model; at "
                f"most {MAX_BUCKET_BYTES} are received. Correct their shapes, or leave them out"
            )


def _headers(tensors: Sequence[TensorMeta], packing: Packing, index: int) -> Iterator[BucketHeader]:
    """One bucket for each broadcast, its tensors laid out as buckets are everywhere."""
    entries: list[BucketEntry] = []
    total = end = 0
    for number, meta in enumerate(tensors, 1):
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        box = Box.full(meta.shape)
        entries.append(BucketEntry(meta.name, meta.dtype, meta.shape, box, offset, meta.nbytes))
        end, total = offset + meta.nbytes, total + meta.nbytes
        if not packing.packed or total > packing.nbytes or number == len(tensors):
            yield BucketHeader(index, tuple(entries), end)
            entries, total, end, index = [], 0, 0, index + 1
