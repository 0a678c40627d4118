"""One update by verbs: broadcasts of a framework's trainer into a lease."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.lease import Lease
from rollout.weight_sync.protocol.bucket import ALIGNMENT
from rollout.weight_sync.protocol.fit import check_metadata, differences
from rollout.weight_sync.protocol.messages import Begun, BucketEntry, BucketHeader, Seal
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weights import Box, TensorMeta
from rollout.weights.names import file_form, is_weight, placed

PACK_BYTES = 1 << 30  # vLLM's own
GRACE = 2.0  # seconds a rank's own deadline comes before ours
_AHEAD = 2  # buckets announced before the first of them has been taken
DETAILS = {"digests": "the sender sent none: these are of what the ranks hold"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How tensors follow each other: each as one broadcast, or packed until over ``nbytes``."""

    packed: bool = False
    nbytes: int = PACK_BYTES


class VllmUpdate:
    """One update under way, and what has come of it."""

    def __init__(
        self,
        of: Coordinator,
        lease: Lease,
        begun: Begun,
        timeout: float,
        deadline: float,
        implicit: bool,
    ) -> None:
        self._of, self.lease = of, lease
        self.update_id, self.version = begun.update_id, begun.version
        self._timeout, self.deadline, self.implicit = timeout, deadline, implicit
        self.label: str | None = None
        self.timer = threading.Timer(deadline, lambda: None)  # not started: see ``_watch``
        self.began = time.monotonic()
        self._sent: list[TensorMeta] = []
        self.calls = self._num_buckets = self._nbytes = 0

    def receive(self, tensors: Sequence[TensorMeta], packing: Packing) -> int:
        """Announce the broadcasts to the ranks in order, a few ahead of what they have taken."""
        tensors = [TensorMeta(file_form(m.name), m.dtype, m.shape) for m in tensors]
        of = self._of.served
        named = ((placed(m.name, of.prefixes), m) for m in tensors)
        taken = (TensorMeta(name, m.dtype, m.shape) for name, m in named if name is not None)
        sent = [*self._sent, *(meta for meta in taken if is_weight(meta.name))]
        check_metadata(sent, of.metadata, of.aliases, partial=True, spelled=of.spelled)
        self._sent = sent
        first = self._num_buckets
        for header in _headers(tensors, packing, first):
            self.lease.bucket(header, None)
            self._num_buckets += 1
            if header.index - first >= _AHEAD - 1:
                self._wait(header.index - _AHEAD + 1)
        for index in range(max(first, self._num_buckets - _AHEAD + 1), self._num_buckets):
            self._wait(index)
        received = sum(meta.nbytes for meta in tensors)
        self._nbytes += received
        self.calls += 1
        return received

    def is_complete(self) -> bool:
        return not self.missing()

    def missing(self) -> Sequence[str]:
        """What the tensors sent so far lack, a line each."""
        of = self._of.served
        return differences(self._sent, of.metadata, of.aliases, spelled=of.spelled)

    def names(self) -> frozenset[str]:
        """What was sent so far, in file form."""
        return frozenset(meta.name for meta in self._sent)

    def confirm(self) -> None:
        """End it without a commit, once the ranks have found its aliases equal to what is live."""
        self.lease.seal_unattested(self._seal(), None)
        self.lease.withdraw("its aliases equal what is live")

    def commit(self, label: str | None) -> UpdateReceipt:
        self.lease.seal_unattested(self._seal(), label)
        return self.lease.commit()

    def _seal(self) -> Seal:
        return Seal(
            num_buckets=self._num_buckets,
            digests={},
            transfer_seconds=time.monotonic() - self.began,
            wire_bytes=self._nbytes,
            details=DETAILS,
        )

    def _wait(self, index: int) -> None:
        self.lease.wait(index, self._timeout + GRACE)


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
