"""What a coordinator asks for, done over the members' links and the record."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from rollout.errors import (
    DeadlineExceeded,
    EngineClosed,
    EngineOverloaded,
    EngineRestarted,
    RolloutError,
    TransferFailed,
)
from rollout.fleet.coordination.actions import Action, Adapters, Ask, Check, Fill, Tell, Write
from rollout.fleet.coordination.coordinator import Coordinator
from rollout.fleet.coordination.record import Record
from rollout.fleet.kind import Kind
from rollout.fleet.link import Link
from rollout.weight_sync.protocol.adapters import digest_of_all, held_adapters
from rollout.weight_sync.protocol.digests import MASK, total
from rollout.weight_sync.protocol.messages import WeightInfo

log = logging.getLogger(__name__)
FILL_TIMEOUT = 30.0  # seconds of each wait while a member is brought up to date
KEPT = 8  # receipts of a member
# What may only mean that a member was not reached; whatever else it answers is its last word.
_UNHEARD = (DeadlineExceeded, EngineClosed, EngineOverloaded, TransferFailed)

# An event of the coordinator, at the time that it is given.
Feed = Callable[[Callable[[float], list[Action]]], None]


class Errands:
    """Thread-safe; each errand waits for its member, or for the disk, and ends with an event that
    is fed to the coordinator ``state``. ``links``: the members as they are now. ``changed``: the
    lock of all three.
    """

    def __init__(
        self,
        state: Coordinator,
        links: Mapping[str, Link],
        record: Record,
        feed: Feed,
        changed: threading.Condition,
    ) -> None:
        self._state, self._links, self._record = state, links, record
        self._feed, self._changed = feed, changed
        self._kind: Kind | None = None  # of all that have served
        self._telling: set[tuple[str, str]] = set()  # (member, update) that is being told

    def run(self, action: Action) -> None:
        try:
            _RUNS[type(action)](self, action)
        except Exception:
            log.exception("the fleet could not do %r", action)

    def unlike(self, info: WeightInfo) -> str:
        """Why it cannot be a member: its model is not that of the first one that served, or held in
        other bits (digests are of what was sent).
        """
        kind = self._kind
        return "" if kind is None else Kind.of(info).unlike(kind)

    def _may_be(self, name: str, info: WeightInfo) -> bool:
        """Whether it may be a member; one that may not is left alone from here on."""
        if why := self.unlike(info):
            self._feed(lambda now: self._state.unfit(name, info.epoch, why, now))
        return not why

    def _ask(self, action: Ask) -> None:
        link = self._links.get(action.member)
        if link is None:
            return
        try:
            standing = link.ask(action.grant)
        except EngineRestarted as error:
            why = str(error)
            restarted = self._state.restarted
            self._feed(lambda now: restarted(action.member, action.grant, why, now))
            return
        except RolloutError as error:
            why = str(error)
            self._feed(lambda now: self._state.silent(action.member, why, now))
            return
        if self._links.get(action.member) is link:
            self._feed(lambda now: self._state.stood(action.member, action.grant, standing, now))

    def _tell(self, action: Tell) -> None:
        told = (action.member, action.decision.update_id)
        with self._changed:
            if told in self._telling:
                return  # it has not answered yet
            self._telling.add(told)
        try:
            self._tell_once(action)
        finally:
            with self._changed:
                self._telling.discard(told)

    def _tell_once(self, action: Tell) -> None:
        link, name, decision = self._links.get(action.member), action.member, action.decision
        if link is None:
            return
        kept = link.receipts.setdefault(decision.update_id, Future())
        try:
            receipt = link.client.decide(decision)
        except RolloutError as error:
            final, why = not isinstance(error, _UNHEARD), str(error)
            if decision.commit and self._links.get(name) is link:
                told = self._state.decided
                of = decision.update_id
                self._feed(lambda now: told(of, name, why, now, final=final))
            return
        if receipt is not None and not kept.done():
            kept.set_result((time.monotonic(), receipt))
        while len(link.receipts) > KEPT:
            link.receipts.pop(next(iter(link.receipts)))
        if self._links.get(name) is link:
            self._feed(lambda now: self._state.decided(decision.update_id, name, "", now))

    def _check(self, action: Check) -> None:
        link, name = self._links.get(action.member), action.member
        if link is None:
            return
        try:
            before = link.control.info()
            if not self._may_be(name, before):
                return
            link.announced(before)
            models = total(link.client.digests(link.client.timeout).values())
            found = _Found.of(link.control.info(), models)
            if found != _Found.of(before, models):
                raise TransferFailed("its weights changed while they were looked at")
        except RolloutError as error:
            why = str(error)
            self._feed(lambda now: self._state.silent(name, why, now))
            return
        with self._changed:  # so that of two kinds one is the first
            if self._links.get(name) is not link or not self._may_be(name, before):
                return
            self._feed(lambda now: self._state.checked(name, *found.weights, now, found.adapters))
            if self._kind is None and name in self._state.serving:
                self._kind = Kind.of(before)

    def _fill(self, action: Fill) -> None:
        link, donor = self._links.get(action.member), self._links.get(action.donor)
        name = action.member
        try:
            if link is None or donor is None:
                raise TransferFailed("its donor has left the fleet")
            if not self._may_be(name, link.control.info()):
                return
            log.info("member %s gets version %d of %s", name, action.version, donor.name)
            receipt = donor.client.send_to(link.sending(action.version, FILL_TIMEOUT))
            adapters = total(adapter.digest for adapter in receipt.adapters.values())
            info = link.control.info()
            link.announced(info)
            found = _Found.of(info, (receipt.digest - adapters) & MASK)
        except RolloutError as error:
            why = f"bringing it up to date from {action.donor} failed: {error}"
            log.warning("member %s: %s", name, why)
            self._feed(lambda now: self._state.unfilled(name, why, now))
            return
        if self._links.get(name) is link:
            self._feed(lambda now: self._state.checked(name, *found.weights, now, found.adapters))

    def _write(self, action: Write) -> None:
        try:
            self._record.write(action.promise)
        except Exception as error:  # noqa: BLE001 - else it is being written for ever
            why = str(error) or type(error).__name__
            self._feed(lambda now: self._state.unwritten(why, now))
            return
        self._feed(lambda now: self._state.written(action.promise, now))


@dataclass(frozen=True, slots=True)
class _Found:
    """What a member holds: its version, the digest of all, and the adapters that are in it."""

    weights: tuple[int, int]
    adapters: Adapters

    @classmethod
    def of(cls, info: WeightInfo, models: int) -> _Found:
        """``models``: the digest of its models, as they were read."""
        adapters = held_adapters(info)
        digest = digest_of_all(models, (adapter.digest for adapter in adapters))
        return cls((info.version, digest), adapters)


_RUNS: dict[type[Any], Callable[[Errands, Any], None]] = {
    Ask: Errands._ask,
    Tell: Errands._tell,
    Check: Errands._check,
    Fill: Errands._fill,
    Write: Errands._write,
}
