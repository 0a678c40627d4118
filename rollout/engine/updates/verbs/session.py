"""Low-level verbs over weights of an engine or a fleet, for frameworks that bring their own sender.

    init --> start --> update ... --> finish          (vLLM's order; TRL, SkyRL and others speak it)
                 \\--> abort, or its deadline

The bytes come over a group that the framework's trainer leads (``transports/foreign``), and fill
the same transaction as every other transport's: staged, judged complete on every rank, committed at
once. There is no stream that could hold the lease, so a deadline does: an update that no verb
touches for that long is aborted. Whenever a broadcast may still be under way as an update fails,
the ranks leave the group: a sender that waits is freed, and what it had left to send cannot be
taken for the next update's. Verbs may be repeated: see ``repeats``.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass

from rollout.engine.updates.verbs.groups import ForeignGroups
from rollout.engine.updates.verbs.repeats import Caller, Said, VerbAnswers
from rollout.engine.updates.verbs.update import (
    GRACE,
    Late,
    Packing,
    Terms,
    VerbTarget,
    VerbUpdate,
    drop,
    taken,
)
from rollout.errors import UpdateInProgress, some
from rollout.errors import VersionConflict as Conflict
from rollout.weight_sync.protocol.label import check_label
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports.foreign_group import ForeignGroup
from rollout.weights import TensorMeta
from rollout.weights.components import component_of

ANYBODY = Caller()
INIT = "init_weight_transfer_engine"
TIMEOUT = 60.0  # seconds of each wait, unless asked otherwise: a trainer may have to gather first
DEADLINE = 300.0  # seconds an update may lie untouched


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """An update that is open: its id, and the version it will have."""

    update_id: str
    version: int


class VerbSession:
    """The verbs of one engine or fleet; any thread, one at a time, ``abort`` and ``close`` beside.

    A second verb while one runs, and a start while an update is open, are ``UpdateInProgress``.
    Each takes its ``caller``, and answers a repeated verb as it did the first: see ``repeats``.
    """

    def __init__(self, target: VerbTarget) -> None:
        self._target = target
        self._answers = VerbAnswers(self._verb_begins, self._verb_ends)
        self._lock = self._answers.lock
        self._open: VerbUpdate | None = None
        self._ended = "none was started"
        self._committed: UpdateReceipt | None = None  # until the next one begins
        self._late = Late()  # what its calls did not hold, and may come behind it
        self._groups = ForeignGroups(target.places)
        self._packing = Packing()
        self._starts = False  # whether this sender says start itself
        self._drops = False  # whether a broadcast is received that is of no update

    def init(
        self, group: ForeignGroup, packing: Packing | None = None, timeout: float = TIMEOUT,
        caller: Caller = ANYBODY,
    ) -> None:  # fmt: skip
        """Take every rank's place in the trainer's group, beside those of other names.

        Returns when the group has formed; ``DeadlineExceeded`` or ``TransferFailed`` when it does
        not within ``timeout`` seconds, or ``abort`` or ``leave`` came meanwhile, ``ConfigError``
        when it has too few places. Where the ranks are in it already, and its trainer lives, they
        stay as they are: the verb came again. An update that a trainer left open which lives no
        more is given up.
        """

        def act() -> None:
            if self._open is not None and not self._groups.are_alive(timeout):
                self._end("its trainer has gone, and an init came")
                self._leave()
            self._none_open()
            self._groups.join(group, timeout)
            self._packing = packing or Packing()
            self._starts, self._late = False, Late()

        said = Said(INIT, caller, repr((group, packing)))
        # The ranks know whether it still holds.
        self._answers.run(said, act, remember=lambda: False)

    @property
    def packing(self) -> Packing:
        """What the init said of it."""
        return self._packing

    def start(
        self, *, timeout: float = TIMEOUT, deadline: float = DEADLINE, in_flight: str = "keep",
        caller: Caller = ANYBODY,
    ) -> Started:  # fmt: skip
        """Open an update, under the caller's ``update_id`` if it gives one.

        ``timeout`` bounds each wait in it, ``deadline`` the time between two verbs, in seconds.
        """

        def act() -> Started:
            self._not_ended(caller)
            self._groups.check_any(self._ended)
            self._none_open()
            self._starts = True
            update = self._begin(caller.update_id, timeout, deadline, in_flight)
            return Started(update_id=update.update_id, version=update.version)

        said = Said("start_weight_update", caller, repr((timeout, deadline, in_flight)))
        return self._answers.run(said, act)

    def update(
        self, tensors: Sequence[TensorMeta], packing: Packing | None = None,
        caller: Caller = ANYBODY, index: int | None = None, *, in_flight: str = "keep",
        label: str | None = None, group: str | None = None,
    ) -> int:  # fmt: skip
        """Receive ``tensors``, which the trainer broadcasts in this order; returns their bytes.

        Names may be those of files or of transformers in memory. Unknown, misshapen or repeated
        ones are a ``WeightMismatch`` before anything is received. Without a start by this sender
        (vLLM before it had one, and SGLang) the call opens an update with ``in_flight``, and the
        one that completes the model commits it. Aliases (a tied head) that come after it are
        compared with what is live, and differing is a ``WeightMismatch``; a prediction head that
        comes after it is an update of its own, which the call that completes the head commits. What
        is no weight here is received, and opens no update. ``index``: which call of the update this
        is, from 0 on, if the sender counts. ``label``: as of ``finish``, which may come without.
        ``group``: the one that brings them, where there are several; each brings a part of the one
        update.
        """

        dropped = False

        def act() -> int:
            nonlocal dropped
            self._is_for(caller)
            if index is not None and index != (now := self._open.calls if self._open else 0):
                raise Conflict(f"update_weights {index} came, and {now} is due")
            self._groups.check(group, self._ended)
            try:
                self._groups.use(group)
                update = self._open
                if update is None:
                    if self._starts:
                        raise Conflict(f"start_weight_update first: {self._ended}")
                    names = [meta.name for meta in taken(tensors, self._target.wanted)]
                    if not names and index is None:
                        received = self._drop(tensors, packing or self._packing)
                        dropped = True
                        return received
                    late = self._late if self._come_late(names) else None
                    if late is not None and late.aliases.issuperset(names):
                        return self._confirm(tensors, packing or self._packing)
                    if late is None:
                        update = self._begin("", TIMEOUT, DEADLINE, in_flight, implicit=True)
                    else:
                        update = self._begin_behind(late, names, in_flight)
                update.label = label or update.label
                received = update.receive(tensors, packing or self._packing)
            except BaseException as error:
                self._end(str(error))
                self._leave()
                raise
            if update.implicit and update.is_complete():
                self._commit(update, None)
                self._late = update.unsent()
            return received

        content = (
            f"{index} {group} {packing} {[(m.name, m.dtype, tuple(m.shape)) for m in tensors]}"
        )
        digest = hashlib.sha256(content.encode()).hexdigest()
        said = Said("update_weights", caller, digest)
        # After one that has committed by itself, the same again is the next update.
        return self._answers.run(said, act, remember=lambda: dropped or self._open is not None)

    def check_group(self, group: str) -> None:
        """``InvalidRequest`` or ``VersionConflict`` where the ranks are not in this group."""
        self._groups.check(group, self._ended)

    def leave(self, group: str | None = None) -> None:
        """Leave this group of the trainer, or all, and give up what is open, or an init of it that
        waits for its trainer.
        """
        waited = self._end_init("ended by destroy_weights_update_group", group)

        def act() -> None:
            if not waited:
                self._groups.check(group, self._ended)
            self._end("the group was destroyed")
            self._leave(group)

        self._answers.run(Said("destroy_weights_update_group", ANYBODY), act)

    def incomplete(self) -> str | None:
        """What an update that commits by itself still lacks; None where there is no such."""

        def act() -> str | None:
            update = self._open
            lacks = update is not None and update.implicit
            return some(update.missing(), 4, "; ") if update is not None and lacks else None

        return self._answers.run(Said("continue_generation", ANYBODY), act)

    @property
    def lacks(self) -> str:
        """As ``incomplete``, also while a verb runs; "" where there is no such update."""
        with self._lock:
            update = self._open
        if update is None or not update.implicit:
            return ""
        return some(update.missing(), 4, "; ") or "the last of it is still on its way"

    def relabel(self, label: str) -> None:
        """Set the label of the live version, without an update; while one is open, of what that
        will make (miles says it before it ends the update).
        """
        with self._lock:
            if self._open is not None:
                check_label(label)
                self._open.label = label
                return
        self._target.relabel(label)

    def refuse(self, reason: str, caller: Caller = ANYBODY) -> None:
        """An update's announcement makes no sense: end it, as one that fails in ``update``."""

        def act() -> None:
            self._is_for(caller)
            self._end(reason)
            self._leave()

        self._answers.run(Said("update_weights", ANYBODY, reason), act)

    def finish(self, label: str | None = None, caller: Caller = ANYBODY) -> UpdateReceipt:
        """Judge the open update complete and make it live, under ``label`` beside its number.

        An update that has just committed, and is live, answers with its receipt again. After one
        that failed or was aborted there is nothing to make live: ``VersionConflict`` with the
        reason.
        """

        def act() -> UpdateReceipt:
            if (
                caller.update_id
                and (earlier := self._target.committed(caller.update_id)) is not None
            ):
                return earlier
            self._is_for(caller)
            if self._open is not None:
                return self._commit(self._open, label)
            last, live = self._committed, self._target.version
            if last is not None and last.version == live:
                return last
            now = "" if last is None else f", and version {live} is now"
            raise Conflict(f"no weight update is open: {self._ended}{now}")

        said = Said("finish_weight_update", caller, repr(label))
        # Without an id it is answered by what is live: something else may be since.
        return self._answers.run(said, act, remember=lambda: caller.update_id != "")

    def abort(self, reason: str = "", caller: Caller = ANYBODY) -> bool:
        """Give the open update up, also while it receives, or an init that waits for its trainer;
        False when there is none, or its commit has begun. One that is prepared is given up where
        its id is said.
        """
        why = "aborted by abort_weight_update" + (f": {reason}" if reason else "")
        if caller.update_id and self._target.give_up_prepared(caller.update_id, reason):
            return True
        if self._end(why, caller.update_id):
            return True
        return not caller.update_id and (self._end_drop(why) or self._end_init(why))

    def close(self) -> None:
        """The engine ends: abort what is open."""
        self._end("the engine was shut down")

    # ---- helpers ----

    def _verb_begins(self) -> None:
        if self._open is not None:
            self._open.timer.cancel()

    def _verb_ends(self) -> None:
        if self._open is not None:
            self._watch(self._open)

    def _is_for(self, caller: Caller) -> None:
        """``VersionConflict`` where the caller means another update than the one that is open."""
        update_id = caller.update_id
        if not update_id or (self._open is not None and self._open.update_id == update_id):
            return
        self._not_ended(caller)
        now = "none is open" if self._open is None else f"{self._open.update_id} is open"
        raise Conflict(f"update {update_id} was not started here, or ended long ago: {now}")

    def _not_ended(self, caller: Caller) -> None:
        """``VersionConflict`` where the caller's update has ended, and how."""
        earlier = self._target.committed(caller.update_id) if caller.update_id else None
        if earlier is not None:
            raise Conflict(f"update {caller.update_id} is live as version {earlier.version}")

    def _watch(self, update: VerbUpdate) -> None:
        """Abort ``update`` unless a verb comes within its deadline."""

        def expire() -> None:
            with self._lock:
                if self._open is not update or self._answers.is_busy:
                    return
            self._end(f"no verb came within its deadline of {update.deadline:g} s")

        update.timer = threading.Timer(update.deadline, expire)
        update.timer.daemon = True
        update.timer.start()

    def _none_open(self) -> None:
        if self._open is not None:
            raise UpdateInProgress(
                f"a weight update has been open for {time.monotonic() - self._open.began:.0f} s: "
                "finish_weight_update or abort_weight_update, or wait for its deadline of "
                f"{self._open.deadline:g} s"
            )

    def _come_late(self, names: Sequence[str]) -> bool:
        """Whether the last update committed without these, may have them, and still is live."""
        last = self._committed
        is_live = last is not None and last.version == self._target.version
        return is_live and bool(names) and all(map(self._late.has, names))

    def _begin_behind(self, late: Late, names: Sequence[str], in_flight: str) -> VerbUpdate:
        """Of a head that comes behind the policy's update, maybe with aliases."""
        head = late.components.intersection(map(component_of, names))
        update = self._begin(
            "", TIMEOUT, DEADLINE, in_flight, implicit=True, partial=bool(late.aliases),
            behind=tuple(sorted(head)),
        )  # fmt: skip
        update.late = late
        return update

    def _drop(self, tensors: Sequence[TensorMeta], packing: Packing) -> int:
        """Receive what is no weight here, and opens no update; returns its bytes."""
        self._drops = True
        try:
            return drop(tensors, packing, self._target.wanted, self._target.places, TIMEOUT)
        finally:
            self._drops = False

    def _confirm(self, tensors: Sequence[TensorMeta], packing: Packing) -> int:
        """Receive late aliases, which must equal what is live; returns their bytes."""
        receipt, late = self._committed, self._late
        update = self._begin("", TIMEOUT, DEADLINE, "keep", implicit=True, partial=True)
        update.late = late
        received = update.receive(tensors, packing)
        update.confirm()
        with self._lock:
            self._open, self._committed = None, receipt
            self._late = Late(aliases=update.unsent().aliases, components=late.components)
        return received

    def _begin(
        self, update_id: str, timeout: float, deadline: float, in_flight: str, *,
        implicit: bool = False, partial: bool = False, behind: tuple[str, ...] = (),
    ) -> VerbUpdate:  # fmt: skip
        self._committed, self._late = None, Late()
        terms = Terms(
            update_id=update_id, timeout=timeout, deadline=deadline, in_flight=in_flight,
            implicit=implicit,
        )  # fmt: skip
        self._open = update = self._target.begin(terms, partial=partial, behind=behind)
        return update

    def _commit(self, update: VerbUpdate, label: str | None) -> UpdateReceipt:
        try:
            receipt = update.commit(label or update.label)
        except BaseException as error:
            self._end(str(error))
            raise
        with self._lock:
            self._open, self._committed = None, receipt
            self._ended = f"the last one went live as version {receipt.version}"
        return receipt

    def _end(self, reason: str, update_id: str = "") -> bool:
        """``update_id``: of the only one that is to end, "" for whichever is open."""
        with self._lock:
            update = self._open
            if update is None or update_id not in ("", update.update_id):
                return False
            self._open = None
            self._answers.forget(update.update_id)
            update.timer.cancel()
            self._ended = f"the last one ended: {reason}"
        return update.abort(reason)

    def _end_drop(self, why: str) -> bool:
        """Free the ranks from a broadcast that is of no update."""
        if found := self._drops:
            self._ended = f"the last broadcast ended: {why}"
            self._leave()
        return found

    def _end_init(self, why: str, group: str | None = None) -> bool:
        """End an init that waits for its trainer; once it is over, the next verb may come."""
        init, found = self._answers.running(INIT), False
        deadline = time.monotonic() + GRACE
        while init is not None and time.monotonic() < deadline:
            found |= self._groups.give_up(why, group)  # it, or a rank, may be there only now
            if futures.wait([init], 0.1).done:
                break
        return found

    def _leave(self, group: str | None = None) -> None:
        if self._groups.leave(group):
            self._ended += "; the ranks have left its group, so that no sender waits in it"
