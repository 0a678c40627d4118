"""Updates of a fleet by the verbs of frameworks' trainers: broadcast to the front, sent on by it.

The front stands in the trainer's group for one engine, and reads what comes there as any other
source: an update of the fleet begins, takes tensors, votes and commits as one of ``publish``.
"""

from __future__ import annotations

import queue
import threading
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from rollout.engine.updates.ended import ended_without_commit
from rollout.engine.updates.verbs.repeats import KEPT
from rollout.engine.updates.verbs.update import GRACE, Terms, VerbUpdate
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    RolloutError,
    TransferFailed,
    VersionConflict,
    WeightMismatch,
    some,
)
from rollout.fleet.fleet import Fleet
from rollout.fleet.updates.channel import FleetChannel
from rollout.fleet.updates.committed import CommittedUpdates, live_receipt
from rollout.fleet.updates.front_places import FrontPlaces
from rollout.weight_sync.protocol.link import LinkOver, WeightLink
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Seal,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.publisher import publish
from rollout.weight_sync.trainer.weight_report import check_weights
from rollout.weights.components import POLICY
from rollout.weights.names import placed
from rollout.weights.wanted import WantedWeights

AHEAD = 2  # broadcasts that wait for members which are slower than the trainer
LONGEST = 8  # of an update's timeouts, within which a step of it has ended
DETAILS = {"digests": "the sender sent none: these are of what the front received"}


class FleetLink(WeightLink, Protocol):
    """What ``FleetTarget`` needs of a fleet's backend."""

    def open(self, kind: Callable[..., FleetChannel] = FleetChannel) -> FleetChannel: ...

    def digests(self, timeout: float) -> dict[str, int]: ...

    def receipts(self) -> tuple[UpdateReceipt, ...]: ...

    @property
    def fleet(self) -> Fleet: ...


class FleetTarget:
    """``VerbTarget`` of a fleet. ``updates``: those that the front has committed."""

    def __init__(self, link: FleetLink, updates: CommittedUpdates) -> None:
        self._link, self._updates = link, updates
        self._failed: dict[str, str] = {}  # why, by id: one is used once
        self.places = FrontPlaces(link.info)

    @property
    def version(self) -> int:
        return self._link.fleet.version

    def committed(self, update_id: str) -> UpdateReceipt | None:
        if (found := self._updates.find(update_id)) is not None:
            return found.receipt
        if (why := self._failed.get(update_id)) is not None:
            raise ended_without_commit(update_id, why)
        if self._link.fleet.promise.update_id == update_id:  # by a front before this one
            return self._of_a_member(update_id)
        return None

    @property
    def wanted(self) -> WantedWeights:
        return self._link.info().wanted

    def begin(
        self, terms: Terms, *, partial: bool = False, behind: tuple[str, ...] = ()
    ) -> VerbUpdate:
        info = self._link.info()
        if behind:
            [head] = behind  # of a release
            return _HeadUpdate(self._link, self.places, info, terms, self._note_failed, head)
        if partial:
            return _AliasComparison(self._link, self.places, info, terms)
        return _BroadcastUpdate(self._link, self.places, info, terms, self._note_failed, info.due)

    def give_up_prepared(self, update_id: str, reason: str) -> bool:
        return False  # a fleet decides by itself

    def relabel(self, label: str) -> None:
        raise ConfigError(
            "a fleet's versions get their labels with the updates that make them: say it there "
            "(weight_version, or update_weights(label=...))"
        )

    def _of_a_member(self, update_id: str) -> UpdateReceipt:
        """The receipt of what is live, from a member; ``VersionConflict`` where none has it."""
        live = live_receipt(self._link.fleet, update_id)
        if live is None:
            raise VersionConflict(
                f"update {update_id} is live as version {self.version}; no member that serves has "
                "its receipt any more"
            )
        return live

    def _note_failed(self, update_id: str, why: str) -> None:
        """But not of one whose end was not seen, and that is live, or may be."""
        try:
            if self._link.info().last_update_id == update_id:
                return
        except RolloutError:
            return
        self._failed[update_id] = why
        while len(self._failed) > KEPT:
            del self._failed[next(iter(self._failed))]


class _Update(VerbUpdate):
    """The front's side of both: one broadcast after the other."""

    def __init__(
        self, places: FrontPlaces, info: WeightInfo, update_id: str, version: int, terms: Terms,
        components: tuple[str, ...],
    ) -> None:  # fmt: skip
        super().__init__(info.wanted, update_id, version, terms, components)
        self._places = places

    def _take(self, headers: Sequence[BucketHeader]) -> None:
        for header in headers:
            self._wait_for_room()
            nbytes = sum(entry.nbytes for entry in header.entries)
            payload = self._places.receive(nbytes, self._timeout, self._check)
            tensors, start = [], 0
            for entry in header.entries:
                raw = payload[start : start + entry.nbytes]
                tensors.append((entry.name, raw.clone().view(entry.dtype).view(entry.shape)))
                start += entry.nbytes
            self._bring(tensors)
            self._num_buckets += 1

    def _wait_for_room(self) -> None:
        """Until one more may come."""

    def _check(self) -> None:
        """Raises what the update has failed by, or was given up for."""

    @abstractmethod
    def _bring(self, tensors: list[tuple[str, Tensor]]) -> None:
        """Take what one broadcast held, by its names."""


class _BroadcastUpdate(_Update):
    """``publish`` in a thread of its own, of what the verbs bring."""

    def __init__(
        self, link: FleetLink, places: FrontPlaces, info: WeightInfo, terms: Terms,
        note_failed: Callable[[str, str], None], components: tuple[str, ...],
    ) -> None:  # fmt: skip
        self._link, self._asked, self._note_failed = link, terms, note_failed
        self._id = terms.update_id or uuid.uuid4().hex
        self._channel: FleetChannel | None = None
        self._parts: queue.SimpleQueue[list[tuple[str, Tensor]] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(AHEAD)
        self._begun: Future[Begun] = Future()
        self._end: Future[UpdateReceipt] = Future()
        self._end.add_done_callback(lambda _: self._room.release())  # who waits looks at it
        self._given_up = ""
        self._commits, self._deciding = False, threading.Lock()
        threading.Thread(target=self._run, name="rollout-fleet-broadcasts", daemon=True).start()
        limit = LONGEST * terms.timeout
        either: list[Future[Any]] = [self._begun, self._end]
        wait(either, limit, FIRST_COMPLETED)
        if not self._begun.done():
            self._check()
            self._give_up(late := f"the fleet's update has not begun within {limit:g} s")
            raise DeadlineExceeded(late)
        begun = self._begun.result()
        super().__init__(places, info, begun.update_id, begun.version, terms, components)

    def confirm(self) -> None:
        raise AssertionError("whole updates are committed")

    def commit(self, label: str | None) -> UpdateReceipt:
        with self._deciding:
            self._check()
            self.label, self._commits = label, True
            self._parts.put(None)
        wait([self._end], LONGEST * self._timeout)
        if not self._end.done():
            raise DeadlineExceeded(
                f"the end of the fleet's update was not seen within {LONGEST * self._timeout:g} "
                "s; members() tells who holds it"
            )
        return self._end.result()

    def abort(self, reason: str) -> bool:
        with self._deciding:
            failed = self._end.done() and self._end.exception() is not None
            if self._commits and not failed:
                return False
            self._give_up(reason)
        self._places.interrupt()
        wait([self._end], GRACE)
        return True

    def told(self, seal: Seal) -> Seal:
        """``seal`` with what is known at the end alone."""
        return replace(seal, label=self.label, details={**seal.details, **DETAILS})

    def has_begun(self, channel: FleetChannel, begun: Begun) -> None:
        self._channel = channel
        if not self._begun.done():
            self._begun.set_result(begun)
        if self._given_up:
            channel.abort(self._given_up)

    # ---- helpers ----

    def _run(self) -> None:
        asked = self._asked
        try:
            options = UpdateOptions(
                in_flight=asked.in_flight, timeout=asked.timeout, sent_as=self._id,
                patience=asked.deadline + asked.timeout,
            )  # fmt: skip
            link = _ToldLink(self._link, self)
            self._end.set_result(publish(self._source(), connect=lambda: link, options=options))
        except BaseException as error:  # noqa: BLE001 - raised by the verb that comes next
            if self._begun.done():
                self._note_failed(self._id, self._given_up or str(error))
            self._end.set_exception(error)

    def _source(self) -> Any:
        return self._pairs()

    def _pairs(self) -> Iterator[tuple[str, Tensor]]:
        while (tensors := self._parts.get()) is not None:
            yield from tensors
            self._room.release()
        if self._given_up:
            raise TransferFailed(self._given_up)

    def _give_up(self, reason: str) -> None:
        self._given_up = reason
        if self._channel is not None:  # which may wait for a member
            self._channel.abort(reason)
        self._parts.put(None)

    def _wait_for_room(self) -> None:
        if not self._room.acquire(timeout=LONGEST * self._timeout):
            raise DeadlineExceeded(
                f"the fleet has not taken a broadcast within {LONGEST * self._timeout:g} s"
            )
        self._check()

    def _bring(self, tensors: list[tuple[str, Tensor]]) -> None:
        self._parts.put(tensors)

    def _check(self) -> None:
        if self._given_up:
            raise TransferFailed(f"the update was given up: {self._given_up}")
        if self._end.done():
            self._end.result()


class _HeadUpdate(_BroadcastUpdate):
    """Of a head that comes behind its policy's update, and of aliases that come with it."""

    def __init__(
        self, link: FleetLink, places: FrontPlaces, info: WeightInfo, terms: Terms,
        note_failed: Callable[[str, str], None], head: str,
    ) -> None:  # fmt: skip
        self._head, self._aliases = head, dict[str, Tensor]()
        super().__init__(link, places, info, terms, note_failed, (head,))

    def commit(self, label: str | None) -> UpdateReceipt:
        _compare_aliases(self._link, self._aliases, self._wanted, self._timeout)
        return super().commit(label)

    def _source(self) -> Any:
        return {self._head: self._pairs()}

    def _bring(self, tensors: list[tuple[str, Tensor]]) -> None:
        aliases = _aliases_in(tensors, self._wanted)
        self._aliases |= aliases
        super()._bring([(name, tensor) for name, tensor in tensors if name not in aliases])


class _ToldLink(LinkOver):
    """``link``, whose updates are ``update``'s."""

    def __init__(self, link: FleetLink, update: _BroadcastUpdate) -> None:
        super().__init__(link)
        self._opens = partial(link.open, partial(_ToldChannel, update))

    def open(self) -> FleetChannel:
        return self._opens()


class _ToldChannel(FleetChannel):
    def __init__(self, update: _BroadcastUpdate, *terms: Any) -> None:
        super().__init__(*terms)
        self._update = update

    def begin(self, request: UpdateRequest) -> Begun:
        begun = super().begin(request)
        self._update.has_begun(self, begun)
        return begun

    def seal(self, seal: Seal) -> None:
        super().seal(self._update.told(seal))


class _AliasComparison(_Update):
    """Aliases that come behind what has committed: they have to equal what is live."""

    def __init__(
        self, link: FleetLink, places: FrontPlaces, info: WeightInfo, terms: Terms
    ) -> None:
        update_id = terms.update_id or uuid.uuid4().hex
        super().__init__(places, info, update_id, info.version, terms, (POLICY,))
        self._link = link
        self._came: dict[str, Tensor] = {}

    def _bring(self, tensors: list[tuple[str, Tensor]]) -> None:
        self._came |= _aliases_in(tensors, self._wanted)

    def confirm(self) -> None:
        _compare_aliases(self._link, self._came, self._wanted, self._timeout)

    def commit(self, label: str | None) -> UpdateReceipt:
        raise AssertionError("aliases that came late are compared")

    def abort(self, reason: str) -> bool:
        self._places.interrupt()
        return True


def _compare_aliases(
    link: FleetLink, came: dict[str, Tensor], wanted: WantedWeights, timeout: float
) -> None:
    """``WeightMismatch`` names those that differ from what is live of their owners."""
    if not came:
        return
    owners, prefixes = wanted.aliases, wanted.prefixes
    report = check_weights(came, connect=lambda: link, timeout=timeout)
    differing = {owners.get(name, name) for name in report.differing}
    problems = [
        f"{name}: differs from {owners[name]}, which it is tied to; untie them in the config "
        "or send equal values"
        for name in (placed(raw, prefixes) for raw in came)
        if name is not None and owners[name] in differing
    ]
    if problems:
        raise WeightMismatch(some(problems, between="; "), problems=problems)


def _aliases_in(tensors: list[tuple[str, Tensor]], wanted: WantedWeights) -> dict[str, Tensor]:
    return {name: t for name, t in tensors if placed(name, wanted.prefixes) in wanted.aliases}
