"""Going back to the version before the last commit: at once, or when a fleet decides so."""

from __future__ import annotations

import time

from rollout.engine.executors import gather_replies
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.ended import Outcome
from rollout.errors import VersionConflict
from rollout.weight_sync.protocol.adapters import digest_of_all
from rollout.weight_sync.protocol.digests import combine, total
from rollout.weight_sync.protocol.membership import PrepareRollback
from rollout.weight_sync.protocol.messages import Begun, Decision
from rollout.weight_sync.protocol.receipts import UpdateReceipt

_TWICE = (
    ". This version is a rollback already: it is the engine's, not a collective of the trainer's "
    "ranks, so call rollback() on one of them alone"
)
_UNTIL = {
    "shadow": "until the next update begins",
    "sparse": "until an update without staging begins",
    "host": "until an update without staging begins",
}


def roll_back(coordinator: Coordinator, timeout: float) -> UpdateReceipt:
    """Make the version before the last commit live again, as a new version.

    Possible once after a commit: with ``undo="shadow"`` until the next update begins to stage over
    it, else until one goes straight into the live instance; else ``VersionConflict``.
    ``ConfigError`` where the engine serves for a fleet.
    """
    coordinator.engine.serving.check_own_update()
    coordinator.turn.take(None, timeout)
    try:
        return Rollback(coordinator).run(timeout)
    finally:
        coordinator.turn.end(None)


class Rollback:
    """One rollback of an engine, which holds the lease of updates while it is prepared."""

    def __init__(self, coordinator: Coordinator, update_id: str = "", timeout: float = 0.0) -> None:
        self.update_id, self._coordinator, self._timeout = update_id, coordinator, timeout
        self._begun: Begun | None = None

    @classmethod
    def prepare(cls, coordinator: Coordinator, request: PrepareRollback) -> None:
        """Vote yes: every rank holds the version before, whose digest is the one asked for.

        The engine is PREPARED then, as by an update that was sealed with a fence. Raises
        ``VersionConflict`` where it cannot go back to that, or not as ``request.version``.
        """
        prepared = coordinator.turn.prepared
        if prepared is not None and prepared.update_id == request.update_id:
            return
        if coordinator.ended.find(request.update_id) is not None:
            raise VersionConflict(f"update {request.update_id} has gone back already")
        one = cls(coordinator, request.update_id, request.timeout)
        coordinator.turn.take(one, request.timeout)
        try:
            one._check(request)
            if coordinator.models_changed:
                coordinator.wait_for_pins(time.monotonic() + request.timeout)
            coordinator.prepare(one, request.fence)
        except BaseException:
            coordinator.turn.end(one)
            raise

    def decided(self, decision: Decision) -> UpdateReceipt | None:
        """The coordinator's alone: go back, or stay."""
        assert self._begun is not None
        receipt: UpdateReceipt | None = None
        reason = decision.reason or "it was decided so"
        try:
            if decision.commit:
                self._coordinator.turn.advance(self, "committing")
                receipt = self.run(self._timeout)
        except BaseException as error:
            reason = str(error)
            raise
        finally:
            self._coordinator.ended.add(Outcome(begun=self._begun, receipt=receipt, reason=reason))
            self._coordinator.turn.end(self)
        return receipt

    def run(self, timeout: float) -> UpdateReceipt:
        """Go back at the next step boundary; for the holder of the lease."""
        coordinator = self._coordinator
        check_possible(coordinator)
        started, version = time.perf_counter(), coordinator.engine.version + 1
        adapters, models = dict(coordinator.adapters.before or {}), coordinator.models_changed
        if models:
            coordinator.wait_for_pins(time.monotonic() + timeout)
        before = coordinator.pins_before() if models else {}
        stall, held = coordinator.switch.run(
            *(None, timeout, coordinator.held_before),
            models=models,
            adapters=adapters,
            name=lambda version: coordinator.adapters.go_back(),
        )
        found = {
            name: coordinator.adapters.kept(before).receipt
            for name, before in adapters.items()
            if before is not None
        }
        if models:
            digest, num_tensors = total(held.values()), len(held)
            num_bytes = sum(meta.nbytes for meta in coordinator.served.wanted.tensors.values())
        else:  # what is below them stays as it was
            digest = total(each.digest for each in found.values())
            num_tensors = sum(each.num_tensors for each in found.values())
            num_bytes = sum(each.num_bytes for each in found.values())
        receipt = UpdateReceipt(
            version=version,
            epoch=coordinator.engine.epoch,
            digest=digest,
            num_tensors=num_tensors,
            num_bytes=num_bytes,
            wire_bytes=0,
            timings={"stall": stall, "total": time.perf_counter() - started},
            ranks=(),
            update_id=self.update_id,
            transport="rollback",
            label=coordinator.label_before,
            adapters=found,
            details=before,
        )
        coordinator.record(
            receipt, receipt.label, held, models=models, merged=coordinator.merged_before
        )
        return receipt

    def _check(self, request: PrepareRollback) -> None:
        coordinator = self._coordinator
        check_possible(coordinator)
        live = coordinator.engine.version
        if request.version != live + 1:
            raise VersionConflict(
                f"version {live} is live here: going back makes {live + 1}, not {request.version}"
            )
        if (digest := _digest_before(coordinator, request.timeout)) != request.digest:
            raise VersionConflict(
                f"what was live here before version {live} has the digest {digest:016x}, and "
                f"{request.digest:016x} is to be live: it joined, or was changed, since"
            )
        self._begun = Begun(
            update_id=request.update_id, epoch=coordinator.engine.epoch, base_version=live,
            version=request.version,
        )  # fmt: skip


def check_possible(coordinator: Coordinator) -> None:
    """``VersionConflict`` where the engine knows that nothing is kept to go back to;
    ``EngineBroken`` where that is adapters alone, and what is below them is broken.
    """
    before = coordinator.adapters.before
    if coordinator.can_roll_back and before is not None and (coordinator.models_changed or before):
        if not coordinator.models_changed:
            coordinator.engine.check_whole()
        return
    again = bool(coordinator.receipts) and coordinator.receipts[-1].transport == "rollback"
    undo = coordinator.served.undo
    raise VersionConflict(
        f"version {coordinator.engine.version} has no predecessor in memory; a rollback is "
        f"possible once after a commit, with undo={undo!r} {_UNTIL[undo]}"
        + (_TWICE if again else "")
    )


def _digest_before(coordinator: Coordinator, timeout: float) -> int:
    """Of all that would be live then."""
    return digest_of_all(
        _models_before(coordinator, timeout), coordinator.adapters.digests_before.values()
    )


def _models_before(coordinator: Coordinator, timeout: float) -> int:
    """Of what every rank would go back to: read there, where it is an instance; else as it was
    when it went live.
    """
    if not coordinator.models_changed:  # adapters alone would go back
        held = coordinator.switch.held
        return total((coordinator.digests(timeout) if held is None else held).values())
    asked = coordinator.engine.call("stage_digests_before", {})
    replies = [reply for reply, _ in gather_replies(asked, "digest", timeout)]
    if not all(reply["possible"] for reply in replies):
        raise VersionConflict("what was live before is gone: the engine has slept since")
    if all(reply["digests"] is not None for reply in replies):
        return total(combine([reply["digests"] for reply in replies]).values())
    if coordinator.held_before is None:
        raise VersionConflict("what was live before is not known by its digest here")
    return total(coordinator.held_before.values())
