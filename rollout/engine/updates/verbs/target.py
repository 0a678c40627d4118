"""An engine as weight verbs act on it: its ranks take the trainer's broadcasts themselves."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence

from rollout.config import DEFAULT_BUCKET_BYTES
from rollout.engine.executors import gather_replies
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.lease import Lease
from rollout.engine.updates.verbs.update import GRACE, Terms, VerbUpdate
from rollout.errors import RolloutError, TransferFailed, WeightMismatch, some
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Decision,
    Seal,
    UpdateRequest,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports.foreign import ForeignTransfer
from rollout.weight_sync.transports.foreign_group import START_LIMIT, ForeignGroup
from rollout.weights.wanted import WantedWeights

_AHEAD = 2  # buckets announced before the first of them has been taken
DETAILS = {"digests": "the sender sent none: these are of what the ranks hold"}


class EngineUpdate(VerbUpdate):
    """Broadcasts into a lease: announced to the ranks a few ahead of what they have taken."""

    def __init__(
        self, wanted: WantedWeights, lease: Lease, begun: Begun, terms: Terms,
        request: UpdateRequest,
    ) -> None:  # fmt: skip
        super().__init__(wanted, begun.update_id, begun.version, terms, request.components)
        self._lease, self._partial = lease, request.partial

    def _take(self, headers: Sequence[BucketHeader]) -> None:
        first = self._num_buckets
        for header in headers:
            self._lease.bucket(header, None)
            self._num_buckets += 1
            if header.index - first >= _AHEAD - 1:
                self._wait(header.index - _AHEAD + 1)
        for index in range(max(first, self._num_buckets - _AHEAD + 1), self._num_buckets):
            self._wait(index)

    def confirm(self) -> None:
        self._lease.seal_unattested(self._seal(None), self.components)
        self._lease.withdraw("its aliases equal what is live")

    def commit(self, label: str | None) -> UpdateReceipt:
        if self._partial and (missing := self.missing()):  # the ranks let it pass
            raise WeightMismatch(some(missing, 4, "; "), problems=missing)
        self._lease.seal_unattested(self._seal(label), self.components)
        return self._lease.commit()

    def abort(self, reason: str) -> bool:
        self._lease.abort(reason)
        return self._lease.is_lost

    def _seal(self, label: str | None) -> Seal:
        return Seal(
            num_buckets=self._num_buckets,
            digests={},
            transfer_seconds=time.monotonic() - self.began,
            wire_bytes=self._nbytes,
            details=DETAILS,
            label=label,
        )

    def _wait(self, index: int) -> None:
        self._lease.wait(index, self._timeout + GRACE)


class RankPlaces:
    """One for each rank, which receives there what it needs."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._joining = ""  # the place that a join has not been told to give up

    @property
    def count(self) -> int:
        return self._coordinator.served.num_ranks

    def join(self, place: str, group: ForeignGroup, timeout: float) -> None:
        self._joining = place
        what = f"an init that waits for its trainer at {group.host}:{group.port}"
        # Other updates' bytes do not wait behind this.
        self._coordinator.turn.take(None, timeout, what=f"{what} (abort_weight_update ends it)")
        try:
            if self._joining != place:
                raise TransferFailed("the group was left before its trainer came")
            args = {"id": place, "group": group.to_wire(), "timeout": timeout}
            limit = timeout + START_LIMIT + GRACE
            gather_replies(self._coordinator.engine.call("stage_join", args), "rendezvous", limit)
        finally:
            self._coordinator.turn.end(None)

    def use(self, place: str) -> None:
        self._coordinator.engine.call("stage_use", {"id": place})

    def are_alive(self, place: str, timeout: float) -> bool:
        try:
            asked = self._coordinator.engine.call("stage_member", {"id": place})
            return all(r["alive"] for r, _ in gather_replies(asked, "rendezvous", timeout))
        except RolloutError:
            return False

    def drop(self, nbytes: int, timeout: float) -> None:
        what = "a broadcast that is of no update"
        self._coordinator.turn.take(None, timeout, what=what)
        try:
            args = {"nbytes": nbytes, "timeout": timeout}
            asked = self._coordinator.engine.call("stage_drop", args)
            gather_replies(asked, "transfer", timeout + GRACE)
        finally:
            self._coordinator.turn.end(None)

    def leave(self, place: str) -> None:
        if self._joining == place:
            self._joining = ""
        try:
            self._coordinator.engine.call("leave_group", {"id": place})
        except RolloutError:  # dead ranks are in no group
            return


class EngineTarget:
    """``VerbTarget`` of one engine."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator, self.places = coordinator, RankPlaces(coordinator)

    @property
    def version(self) -> int:
        return self._coordinator.engine.base_version

    def committed(self, update_id: str) -> UpdateReceipt | None:
        outcome = self._coordinator.ended.find(update_id)
        return None if outcome is None else outcome.committed

    @property
    def wanted(self) -> WantedWeights:
        return self._coordinator.served.wanted

    def begin(
        self, terms: Terms, *, partial: bool = False, behind: tuple[str, ...] = ()
    ) -> EngineUpdate:
        lease = Lease(self._coordinator, (ForeignTransfer.name,))
        request = UpdateRequest(
            update_id=terms.update_id or uuid.uuid4().hex,
            transport=ForeignTransfer.name,
            bucket_bytes=DEFAULT_BUCKET_BYTES,
            in_flight=terms.in_flight,
            timeout=terms.timeout,
            partial=partial,
            components=behind or self._coordinator.info().due,
        )
        return EngineUpdate(self.wanted, lease, lease.begin(request), terms, request)

    def relabel(self, label: str) -> None:
        self._coordinator.relabel(label)

    def give_up_prepared(self, update_id: str, reason: str) -> bool:
        prepared = self._coordinator.turn.prepared
        if prepared is None or prepared.update_id != update_id:
            return False
        self._coordinator.decide(
            Decision(update_id=update_id, commit=False, fence=None, reason=reason)
        )
        return True
