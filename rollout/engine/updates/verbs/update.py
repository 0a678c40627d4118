"""One update by verbs: what a framework's trainer broadcasts, wherever it goes on to."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

from rollout.errors import WeightMismatch, some
from rollout.weight_sync.protocol.bucket import ALIGNMENT
from rollout.weight_sync.protocol.fit import check_metadata, differences
from rollout.weight_sync.protocol.messages import MAX_BUCKET_BYTES, BucketEntry, BucketHeader
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports.foreign_group import ForeignGroup
from rollout.weights import Box, TensorMeta
from rollout.weights.components import POLICY, component_of
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """What an update has not had, and what may still come behind it where it commits by itself:
    names of other tensors (a tied head), and components that a policy's stream may have, too.
    """

    aliases: frozenset[str] = frozenset()
    components: frozenset[str] = frozenset()

    @classmethod
    def all_of(cls, wanted: WantedWeights) -> Self:
        return cls(aliases=frozenset(wanted.aliases), components=frozenset(wanted.routed))

    def has(self, name: str) -> bool:
        return name in self.aliases or component_of(name) in self.components

    def without(self, names: Collection[str]) -> Late:
        return Late(
            aliases=self.aliases.difference(names),
            components=self.components.difference(map(component_of, names)),
        )


class VerbUpdate(ABC):
    """One update under way, and what has come of it.

    ``due``: the components that it has to have. Where the policy is none of them, it came before,
    and what is not of these, nor a ``late`` alias of it, is refused.
    """

    def __init__(
        self, wanted: WantedWeights, update_id: str, version: int, terms: Terms,
        due: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._wanted = replace(wanted, schemes={})  # codes come by no verb
        self._due, self.late = due, Late.all_of(wanted)
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
        sent = [*self._sent, *taken(tensors, self._wanted)]
        self._check_begun(sent)
        check_metadata(sent, self._wanted, partial=True)
        headers = list(_headers(tensors, packing, self._num_buckets))
        _check_dropped(headers, self._wanted)
        self._sent = sent
        self._take(headers)
        received = sum(meta.nbytes for meta in tensors)
        self._nbytes += received
        self.calls += 1
        return received

    @property
    def components(self) -> frozenset[str]:
        """Those that it is of: all that it has to have, or had something of."""
        sent = (meta.name for meta in self._sent if not self._is_behind(meta.name))
        return frozenset(self._due).union(map(component_of, sent))

    def is_complete(self) -> bool:
        return not self.missing()

    def missing(self) -> Sequence[str]:
        """What the tensors sent so far lack, a line each."""
        sent = [meta for meta in self._sent if not self._is_behind(meta.name)]
        return differences(sent, self._wanted, components=self._due)

    def unsent(self) -> Late:
        """Of what may come ``late`` that which was not sent so far."""
        return self.late.without([meta.name for meta in self._sent])

    def _is_behind(self, name: str) -> bool:
        """Whether it is an alias of what was live before, which is compared alone."""
        return POLICY not in self._due and component_of(name) not in self._due

    def _check_begun(self, sent: Sequence[TensorMeta]) -> None:
        """``WeightMismatch`` where the next update begins before a head that came late is whole."""
        if POLICY in self._due:
            return
        if others := [meta.name for meta in sent if not self.late.has(meta.name)]:
            missing = some(self.missing(), 4, "; ")
            raise WeightMismatch(
                f"{some(others, 4)} came before {' and '.join(self._due)}, which began to "
                f"come behind the last update, had come whole: {missing}. Say "
                "start_weight_update before an update and finish_weight_update behind it "
                "(/begin_weight_update, /end_weight_update), or send a head whole, or none of it"
            )

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

    def drop(self, nbytes: int, timeout: float) -> None:
        """Receive a broadcast that is of no update."""
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

    @property
    def wanted(self) -> WantedWeights: ...

    def begin(
        self, terms: Terms, *, partial: bool = False, behind: tuple[str, ...] = ()
    ) -> VerbUpdate:
        """Of a policy's stream; ``behind``: of these components alone, which come behind it, and
        with ``partial`` of its aliases, too. ``partial`` by itself: of aliases alone, to be
        confirmed.
        """
        ...

    def give_up_prepared(self, update_id: str, reason: str) -> bool:
        """Whether it waits for a decision; then, by an operator's word, it is over."""
        ...

    def relabel(self, label: str) -> None:
        """Set the label of the live version; ``ConfigError`` where that cannot be."""
        ...


def taken(tensors: Sequence[TensorMeta], wanted: WantedWeights) -> list[TensorMeta]:
    """Those that are weights of the model, by its names."""
    found = []
    for meta in tensors:
        name = placed(file_form(meta.name), wanted.prefixes)
        if name is not None and is_weight(name):
            found.append(replace(meta, name=name))
    return found


def drop(
    tensors: Sequence[TensorMeta], packing: Packing, wanted: WantedWeights, places: Places,
    timeout: float,
) -> int:  # fmt: skip
    """Receive the broadcasts of ``tensors``, none of which is ``taken``; returns their bytes."""
    headers = list(_headers(tensors, packing, 0))
    _check_dropped(headers, wanted)
    for header in headers:
        places.drop(sum(entry.nbytes for entry in header.entries), timeout)
    return sum(meta.nbytes for meta in tensors)


def _check_dropped(headers: Sequence[BucketHeader], wanted: WantedWeights) -> None:
    """Nothing says what shape they have that are not taken: memory for any size would be asked
    for.
    """
    for header in headers:
        entries = [
            entry
            for entry in header.entries
            if not taken([TensorMeta(entry.name, entry.dtype, entry.shape)], wanted)
        ]
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
