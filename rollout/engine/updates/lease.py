"""One update on the engine's side: the in-process ``WeightChannel`` to a coordinator."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from rollout.engine.executors import gather_replies
from rollout.engine.updates.adapters import KeptAdapter
from rollout.engine.updates.bucket_queue import BucketQueue
from rollout.engine.updates.commit import Sealed, take_votes
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.ended import Outcome
from rollout.engine.updates.limits import Foreseen
from rollout.errors import (
    IncompleteUpdate,
    RolloutError,
    TransferFailed,
    VersionConflict,
    WeightMismatch,
    shortened,
    some,
)
from rollout.generation.metrics import NOT_BEGUN
from rollout.weight_sync.protocol.bucket import check_size
from rollout.weight_sync.protocol.digests import compare
from rollout.weight_sync.protocol.label import check_label
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Decision,
    Seal,
    UpdateRequest,
    Wants,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports.base import Accepted
from rollout.weights import TensorMeta
from rollout.weights.components import component_of
from rollout.wire.codec import from_plain, to_plain

log = logging.getLogger(__name__)


class Lease:
    """The right to change the weights, for one update; taken at its ``begin``.

    ``transports``: the ones it may use, if not those that the coordinator accepts from everybody.
    ``abort`` and ``close`` may be called from any thread.
    """

    reads_in_place = True
    secret = ""

    def __init__(self, coordinator: Coordinator, transports: tuple[str, ...] | None = None) -> None:
        self._coordinator, self._engine = coordinator, coordinator.engine
        self._transports = coordinator.transports if transports is None else transports
        self._accepted = Accepted()
        self._asked: UpdateRequest | None = None  # as it came, to recognise a repeated begin
        self._request: UpdateRequest | None = None
        self._begun: Begun | None = None
        self._committed: UpdateReceipt | None = None
        self._replays: Outcome | None = None  # the commit of a repeated update id
        self._buckets = BucketQueue(coordinator.engine)
        self._sealed: Sealed | None = None
        self._foreseen: Foreseen | None = None  # of an update with limits
        self._drained = self._base_is_whole = False
        self._held_since: float | None = None  # no step runs since then (staging="none")
        self._touched = False  # ranks may have begun to overwrite what they hold
        self._slots: dict[str, int] = {}  # where its adapters are staged
        self._wanted: Mapping[str, TensorMeta] = {}  # all that may be sent
        # Another thread may close at any time. While ``begin`` runs, the cleaning up is left to it;
        # a commit that has begun cannot be stopped.
        self._lock = threading.Lock()
        self._phase = ""  # beginning | committing, while one of them runs; prepared, from a vote on
        self._ended: str | None = None
        self._freed = False
        self._started = time.perf_counter()
        self._began = time.monotonic()  # with the wait for the lease

    def begin(self, request: UpdateRequest) -> Begun:
        return self.begin_in_turn(request, None)

    def begin_in_turn(
        self, request: UpdateRequest, in_turn: Callable[[UpdateRequest], UpdateRequest] | None
    ) -> Begun:
        if self._begun is not None and request == self._asked:
            return self._begun
        if self._asked is not None:
            raise VersionConflict("a channel carries one update; open another")
        coordinator = self._coordinator
        self._enter("beginning")
        try:
            self._accepted = coordinator.check_fields(request, self._transports)
            self._asked, self._began = request, time.monotonic()
            if (outcome := self._acquire(request)) is not None:
                return self._replay(request, outcome)
            self._started = time.perf_counter()
            request = replace(coordinator.staged_in(request), version=coordinator.check(request))
            if request.staging == "none":  # past ``begin`` it has overwritten what is live
                self._engine.serving.check_own_update()
            self._not_ended("begin")
            if in_turn is not None:
                request = in_turn(request)
                self._accepted = coordinator.check_fields(request, self._transports)
            self._request, self._wanted = request, coordinator.wanted(request).tensors
            self._not_ended("begin")
            self._foreseen = coordinator.foresee(request)
            layout, wants = self._stage(request)
            self._leave()
            self._not_ended("begin")
        except BaseException as error:
            self._leave()
            if self._request is None and isinstance(error, WeightMismatch):
                self._refused(str(error))
            self._end(self._ended or str(error), failed=True)
            raise
        assert request.version is not None
        log.info(
            "update %s begins: version %d, by %s, %s, staging=%s",
            *(request.update_id, request.version, request.transport, request.encoding),
            request.staging,
        )
        self._begun = Begun(
            update_id=request.update_id,
            epoch=self._engine.epoch,
            base_version=self._engine.version,
            version=request.version,
            layout=layout,
            wants=wants,
        )
        return self._begun

    def buffer(self, nbytes: int) -> Tensor | None:
        if self._replays is not None:
            return None
        request = self._live("bucket")
        return self._engine.buffer(nbytes) if nbytes <= request.bucket_bytes else None

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        if self._replays is not None:
            return
        if payload is not None and self._buckets.comes_again(header):
            return
        self._announce(header, None if payload is None else {"payload": payload})

    @property
    def reads_on(self) -> str:
        return self._engine.reads_on

    def in_place(self, header: BucketHeader, regions: Sequence[Tensor]) -> None:
        assert self.reads_on, "its rank is elsewhere"
        carried = {str(index): region for index, region in enumerate(regions)}
        self._announce(header, carried, plain=False)

    def _announce(
        self, header: BucketHeader, carried: Mapping[str, Tensor] | None, plain: bool = True
    ) -> None:
        request = self._live("bucket")
        if self._accepted.bounded:
            check_size(header, request.bucket_bytes)
        while self._buckets.is_full(self._accepted.senders):
            self.wait(self._buckets.waiting[0], request.timeout)
        self._buckets.announce(request.update_id, header, carried, plain=plain)

    def wait(self, index: int, timeout: float) -> None:
        if self._replays is not None:
            return
        self._live("transfer")
        with self._or_abort():
            self._buckets.wait(index, timeout)

    def seal(self, seal: Seal) -> None:
        if self._replays is not None:
            assert self._asked is not None
            if seal.fence is not None:  # who decides would take what was live once for what will be
                raise VersionConflict(
                    f"update {self._asked.update_id} has been committed here already, as version "
                    f"{self._replays.committed.version}: it cannot be prepared again"
                )
            self._replays.check_same(seal, self._coordinator.wanted(self._asked).tensors)
            return
        request, coordinator = self._live("seal"), self._coordinator
        if self._sealed is not None and self._sealed.seal == seal:
            return

        if seal.fence is None:
            self._check_own()
        self._name(seal.label)
        wanted = self._wanted

        def judge(held: Mapping[str, int]) -> Seal:
            whole = {*request.components, *map(component_of, seal.digests)}
            missing = {n for n in wanted if component_of(n) in whole} - set(seal.digests)
            if missing and not request.partial:
                raise IncompleteUpdate(f"sealed without {some(sorted(missing))}")
            compare(seal.digests, held, coordinator.served.wanted.aliases)
            return seal

        if seal.fence is not None and request.staging == "none":
            raise VersionConflict("an update without staging holds generation: it cannot prepare")
        self._vote(seal.num_buckets, judge)
        if seal.fence is not None:
            self._enter("prepared")
            try:
                coordinator.prepare(self, seal.fence)
            except RolloutError as error:
                self._leave()
                self.abort(str(error))
                raise

    @property
    def update_id(self) -> str:
        return "" if self._request is None else self._request.update_id

    def decided(self, decision: Decision) -> UpdateReceipt | None:
        """Called by the coordinator only: the end of a prepared update."""
        if decision.commit:
            return self._commit()
        self._leave()
        who = "an operator" if decision.fence is None else f"fencing epoch {decision.fence}"
        self.abort(f"aborted by {who}" + (f": {decision.reason}" if decision.reason else ""))
        return None

    def seal_unattested(self, seal: Seal, components: Collection[str]) -> None:
        """As ``seal``, for a sender without digests: the receipt has those of what the ranks hold,
        of ``components``.

        The ranks judge completeness, and copies of one box must agree; nothing proves that what
        arrived is what was sent.
        """
        self._check_own()
        self._name(seal.label)

        def judge(held: Mapping[str, int]) -> Seal:
            digests = {n: value for n, value in held.items() if component_of(n) in components}
            return replace(seal, digests=digests)

        self._vote(seal.num_buckets, judge)

    def _check_own(self) -> None:
        """A fleet's updates alone are decided elsewhere, and say so first at their seal."""
        with self._or_abort():
            self._engine.serving.check_own_update()

    def _name(self, label: str | None) -> None:
        """Of the version, in the place of what its request says, if that is known only now."""
        request = self._live("seal")
        if label is not None:
            check_label(label)
            self._request = replace(request, label=label)

    def commit(self) -> UpdateReceipt:
        if self._replays is not None:
            return self._replays.committed
        if self._committed is not None:
            return self._committed
        if self._phase == "prepared":
            raise VersionConflict(f"update {self.update_id} is prepared: it takes a decision alone")
        return self._commit()

    def _commit(self) -> UpdateReceipt:
        request, coordinator = self._live("commit"), self._coordinator
        adapters = coordinator.adapters
        if self._sealed is None:
            raise VersionConflict("commit before seal")
        started = time.perf_counter()
        try:
            self._drain(request)
            # Nothing may fail once it is live.
            receipt = self._sealed.receipt(self._wanted, self._engine.epoch, request)
            self._enter("committing")
            coordinator.turn.advance(self, "committing")
            models = coordinator.served.wanted.tensors
            held = {n: v for n, v in self._sealed.held.items() if n in models}
            before = coordinator.pins_before() if request.models else {}
            made = {
                name: KeptAdapter.of(name, receipt.adapters[name], spec)
                for name, spec in request.adapters.items()
            }
            stall, held = coordinator.switch.run(
                *(request, request.timeout, held),
                pin=coordinator.pin_terms(request),
                models=bool(request.models),
                adapters=request.adapters,
                name=lambda version: adapters.commit(self._slots, made, request.adapters_after),
            )
        except BaseException as error:
            self._leave()
            self.abort(str(error))
            raise
        self._slots, self._committed = {}, receipt
        try:
            now = time.perf_counter()
            if self._held_since is not None:
                stall = now - self._held_since
            times = {"commit": now - started, "stall": stall, "total": now - self._started}
            limits = self._against_limits(request, stall, receipt.num_bytes)
            details = {**receipt.details, **limits, **before}
            if self._engine.pins.since == receipt.version:
                details["pinned"] = self._engine.pins.told
            receipt = replace(receipt, timings={**receipt.timings, **times}, details=details)
            self._committed = receipt
            coordinator.record(
                *(receipt, request.label, held, self._base_is_whole),
                models=bool(request.models),
                merged=coordinator.merged_after(request),
            )
        finally:  # it is live, even if recording it fails
            self._leave()
            self._end("committed")
        return receipt

    def abort(self, reason: str) -> None:
        if self._phase != "beginning" and self._asked is None and not self._freed:
            self._refused(reason)
        self._end(reason, failed=True)

    def withdraw(self, reason: str) -> None:
        """End a sealed update that has nothing to commit; it does not count as a failure."""
        self._end(reason)

    def close(self) -> None:
        when = f"while its tensors came in, after {self._buckets.count} buckets"
        if self._begun is None:
            when = "before the update had begun"
        elif self._sealed is not None:
            when = "between the ranks' votes and the commit"
        staged = self._request is None or self._request.staging != "none"
        serves = f": version {self._engine.version} serves on" if staged else ""
        reason = f"the trainer went away, or closed its channel, {when}{serves}"
        self._end(reason, failed=True, told=self._request is not None)

    @property
    def is_lost(self) -> bool:
        """Whether the update has ended otherwise than by its commit, or is sure to."""
        return self._ended not in (None, "committed")

    # ---- helpers ----

    def _refused(self, reason: str) -> None:
        """Count an update that failed before it began, here or by its trainer's own checks."""
        self._engine.counters.record_failed_update(NOT_BEGUN, reason)

    def _against_limits(
        self, request: UpdateRequest, stall: float, num_bytes: int
    ) -> dict[str, str]:
        """Record the stall for later estimates; returns what the receipt says about it."""
        kind = "exchange" if self._coordinator.switch.moved else "flip"
        if request.staging == "none":
            kind = "held"
        if request.models:  # a commit of adapters alone says nothing of theirs
            self._coordinator.limits.measured(kind, stall, num_bytes)
        if self._foreseen is None:
            return {}
        told = self._foreseen.told(request.max_stall, stall)
        if told.get("max_stall", "").startswith("broken"):
            log.warning("update %s: max_stall is %s", request.update_id, told["max_stall"])
        return told

    def _acquire(self, request: UpdateRequest) -> Outcome | None:
        """Take the lease; or return, without it, the commit that this id has made meanwhile."""
        turn, ended = self._coordinator.turn, self._coordinator.ended
        outcome = ended.find(request.update_id)
        if outcome is None:
            turn.take(self, request.timeout, check=partial(self._not_ended, "begin"))
            outcome = ended.find(request.update_id)
            if outcome is not None:
                turn.end(self)
        return outcome

    def _stage(self, request: UpdateRequest) -> tuple[str, Wants | None]:
        """Have the ranks open what will be filled; returns what they want, if it has to be sent."""
        coordinator, check = self._coordinator, partial(self._not_ended, "begin")
        if request.models:  # adapters leave both instances alone
            coordinator.wait_for_pins(self._began + request.timeout, check)
        args: dict[str, Any] = {"request": to_plain(replace(request, metadata=None))}
        if request.adapters:  # may be refused, or wait: before steps are held or a byte is written
            self._slots = coordinator.adapters.reserve(
                *([*request.adapters], request.timeout, self._began, check),
                after=request.adapters_after,
            )
            args["slots"] = self._slots
        coordinator.staging_begins(request)
        if request.staging == "none":
            self._drain(request)  # running requests cannot end once steps are held
            self._engine.control.hold(request.timeout)
            self._held_since = time.perf_counter()
        self._touched = True
        # What a rollback would bring back: not there if nothing keeps it, no version if broken.
        overwrites = request.models and request.staging == "none"
        kept = not overwrites or coordinator.served.undo != "shadow"
        self._base_is_whole = kept and self._engine.broken is None
        replies = gather_replies(self._engine.call("stage_begin", args), "begin", request.timeout)
        self._buckets.connect(request.update_id)
        return _wants([reply for reply, _ in replies], self._accepted.known)

    def _replay(self, request: UpdateRequest, outcome: Outcome) -> Begun:
        """Answer an update that is live already as it was answered then."""
        if not self._accepted.on_channel:
            raise VersionConflict(
                f"update {request.update_id} has been committed here already, as version "
                f"{outcome.committed.version}: another update needs an update_id of its own"
            )
        self._replays = outcome
        self._leave()
        return outcome.begun

    def _vote(self, num_buckets: int, judge: Callable[[Mapping[str, int]], Seal]) -> None:
        """Collect every rank's vote, and ``judge``'s on the digests they hold; any may refuse."""
        request, coordinator = self._live("seal"), self._coordinator
        for index in self._buckets.waiting:
            self.wait(index, request.timeout)
        with self._or_abort():
            self._sealed = take_votes(self._engine, request, num_buckets, judge)
        coordinator.turn.advance(self, "staged")

    def _live(self, phase: str) -> UpdateRequest:
        if self._request is None:
            raise VersionConflict(f"{phase} before begin")
        self._not_ended(phase)
        return self._request

    def _not_ended(self, phase: str) -> None:
        if self._ended is not None:
            raise TransferFailed(f"the update ended before its {phase}: {self._ended}")

    def _enter(self, phase: str) -> None:
        with self._lock:
            self._not_ended(phase)
            self._phase = phase

    def _leave(self) -> None:
        with self._lock:
            self._phase = ""

    @contextmanager
    def _or_abort(self) -> Iterator[None]:
        """Whatever is raised within ends the update."""
        try:
            yield
        except BaseException as error:
            self.abort(str(error))
            raise

    def _end(self, reason: str, failed: bool = False, told: bool = True) -> None:
        reason = shortened(reason)  # kept, and logged
        with self._lock:
            if self._freed or self._phase in ("committing", "prepared"):
                return
            self._ended = self._ended or reason
            begins = self._phase == "beginning"
            self._freed = not begins
        request, coordinator = self._request, self._coordinator
        if begins:  # and may wait there
            coordinator.turn.look_again()
            return
        if self._begun is not None:
            begun = replace(self._begun, wants=None)
            coordinator.ended.add(Outcome(begun=begun, receipt=self._committed, reason=self._ended))
        if request is not None:
            if failed:
                self._engine.counters.record_failed_update(request.update_id, reason)
                self._tell_ranks(request)
                if request.staging == "none" and self._touched:
                    self._restore(request, reason)
            if request.staging == "none":
                self._engine.control.release()
            if self._drained:
                self._engine.control.undrain()
            coordinator.adapters.release(self._slots)
        if failed and (told or request is not None):
            self._log_failure(reason)
        coordinator.turn.end(self)

    def _log_failure(self, reason: str) -> None:
        """A warning in a service; where nobody else is connected, the caller has it as an error."""
        name = "an update" if self._asked is None else f"update {self._asked.update_id}"
        end = "was refused" if self._request is None else "failed"
        version, broken = self._engine.version, self._engine.broken
        serves = "nothing serves" if broken else f"version {version} serves on"
        level = logging.WARNING if self._engine.counters.is_served else logging.INFO
        log.log(level, "%s %s, %s: %s", name, end, serves, reason)

    def _restore(self, request: UpdateRequest, reason: str) -> None:
        """Restore the weights from before an unstaged update; else the engine is broken, before a
        step may run again, which would be by torn weights.
        """
        torn = f"an update without staging failed midway: {reason}"
        if not self._base_is_whole:
            self._engine.mark_broken(torn)
        elif why := self._coordinator.restore(request.timeout):
            self._engine.mark_broken(f"{torn}; going back: {why}")

    def _drain(self, request: UpdateRequest) -> None:
        if request.in_flight == "wait" and not self._drained:
            self._drained = True
            self._engine.control.drain(request.timeout)

    def _tell_ranks(self, request: UpdateRequest) -> None:
        args = {"update_id": request.update_id}
        try:
            # The first frees a staging thread that is blocked, the second runs on that thread.
            self._engine.call("interrupt_update", args)
            self._engine.call("stage_abort", args)
        except RolloutError:
            return  # dead ranks hold no update


def _wants(replies: Sequence[Mapping[str, Any]], known: str) -> tuple[str, Wants | None]:
    """The ranks' wants and their digest; None where the digest is ``known``, "" for no wants."""
    rows = [reply["wants"] for reply in replies if "wants" in reply]
    if not rows:
        return "", None
    layout = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
    return layout, None if layout == known else from_plain(Wants, rows)
