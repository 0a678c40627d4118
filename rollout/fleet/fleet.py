"""Members at their addresses, and the threads that do what the coordinator asks."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    RolloutError,
)
from rollout.fleet import late
from rollout.fleet.coordination.actions import MAX_LEASE, Action, Adapters, Ask, Ended, Promise
from rollout.fleet.coordination.coordinator import Coordinator
from rollout.fleet.coordination.member import describe
from rollout.fleet.coordination.member_log import MemberLog
from rollout.fleet.coordination.record import Record
from rollout.fleet.directory import Directory
from rollout.fleet.errands import Errands
from rollout.fleet.link import Link, let_go
from rollout.rpc.address import split_address
from rollout.rpc.tls import ClientTls
from rollout.weight_sync.protocol.membership import Grant, Standing
from rollout.weight_sync.protocol.messages import WeightInfo

T = TypeVar("T")
log = logging.getLogger(__name__)
LEASE = 2.0  # seconds
PATIENCE = 0.25  # of an update's timeout
THREADS = 64
COPIED = 60.0  # seconds for which whoever alone holds what is live is kept, whatever its notice
KEPT = 8  # outcomes of updates, and receipts of a member
_CLOSED = (
    "the fleet's front was closed: what it was about to commit is live if its record says so; a "
    "front that opens the record goes by it"
)


class Fleet(Directory):
    """Thread-safe. ``quorum``: members that must hold a version for it to commit; None is 2, or 1
    where there is one member. ``lease``: seconds for which a member that hears nothing serves on.
    ``tls``: how members are reached that speak it. ``patience``: for how much of an update's
    timeout (a lease at least) members are waited for, in each step, that are later than others.
    """

    def __init__(
        self,
        record: Record,
        *,
        quorum: int | None = None,
        lease: float = LEASE,
        tls: ClientTls | None = None,
        patience: float = PATIENCE,
    ) -> None:
        if not 0 <= patience <= 1:
            raise ConfigError(f"patience is a share of a timeout, from 0 to 1, got {patience}")
        if not 0 < lease <= MAX_LEASE:
            raise ConfigError(f"lease must be above 0 and at most {MAX_LEASE:g} s, got {lease}")
        if quorum is not None and quorum < 1:
            raise ConfigError(f"quorum must be 1 or more, got {quorum}")
        self.lease, self._tls, self._patience = lease, tls, patience
        self.record, self._quorum = record, quorum
        self._state = Coordinator(
            record.promise, quorum=quorum or 1, lease=lease, now=time.monotonic(),
            earlier=record.earlier,
        )  # fmt: skip
        self._links: dict[str, Link] = {}
        self._log = MemberLog()
        self._ended: dict[str, Future[Ended]] = {}
        self._changed = threading.Condition(threading.RLock())
        self._errands = Errands(self._state, self._links, record, self._feed, self._changed)
        self._pool = ThreadPoolExecutor(THREADS, "rollout-fleet")
        # Apart from the others: a member that keeps an update waiting holds up no grant.
        self._updating = ThreadPoolExecutor(THREADS, "rollout-fleet-update")
        self._closing = threading.Event()
        self._commits = 0  # of which an answer is due
        self.members_lost = 0  # how often one has left service without being told to
        self._served: set[str] = set()  # when that was looked at last
        self.parted = 0
        self._ticker = threading.Thread(target=self._tick, name="rollout-fleet-tick", daemon=True)
        self._ticker.start()

    # ---- members ----

    def add(
        self,
        address: str,
        token: str | None = None,
        name: str | None = None,
        *,
        tls_server_name: str | None = None,
        ask: bool = False,
        http: str = "",
        pid: int | None = None,
    ) -> str:
        """A member at "host:port" of its gRPC server, under ``name`` (default: the address).

        Under the name of another it takes that one's place. It serves once it is known to hold what
        the fleet serves, and it need not be there yet; with ``ask`` whoever answers there now has
        to be an engine of the fleet's model. ``tls_server_name``: what its certificate is made out
        to, where that is not what the others' are. ``http``, ``pid``: as a ``Link`` has them.
        ``ConfigError`` for a bad address, and for an engine that is a member.
        """
        tls = self._tls
        if tls_server_name is not None:
            if tls is None:
                raise ConfigError("tls_server_name needs a fleet that reaches its members over TLS")
            tls = replace(tls, server_name=tls_server_name)
        link = Link.to(address, token, name or address, self.lease, tls)
        link.http, link.pid = http, pid
        try:
            if ask:
                self._meet(link)
            with self._changed:
                if name is None:  # else it may be where another was: who it is tells its epoch
                    self._check_address(link)
                old = self._links.get(link.name)
                self._links[link.name] = link
                self._do(self._state.add(link.name, time.monotonic()))
                self._set_quorum()
        except RolloutError:
            link.close()
            raise
        if old is not None:
            old.close()
        return link.name

    def remove(self, name: str) -> None:
        with self._changed:
            link = self._links.pop(name, None)
            if link is None:
                raise _no_member(name)
            for action in self._state.remove(name, time.monotonic()):
                if isinstance(action, Ask):
                    self._pool.submit(self._let_go, link, action.grant)
                else:
                    self._do([action])
            self._set_quorum()

    def leave(self, name: str, notice: float) -> None:
        """Remove a member that gets nothing new from here on, once what runs there has ended, or
        ``notice`` seconds are over; what still runs then goes on elsewhere. One that alone holds
        what is live stays until another has its copy, ``COPIED`` seconds at the most where its
        notice is shorter. ``ConfigError`` for a name that is none; again for one that is leaving
        waits for the same end.
        """
        began = time.monotonic()
        with self._changed:
            if (link := self._links.get(name)) is None:
                raise _no_member(name)
            self._do(self._state.leave(name, began))
            self._set_quorum()

        def may_go() -> bool:
            return self._links.get(name) is not link or not self._is_kept(link, began + notice)

        self.wait(may_go, max(notice, COPIED))
        with self._changed:
            if self._links.get(name) is not link:
                return
            self._do(self._state.let_go(name, time.monotonic()))

        def has_ended() -> bool:
            return not link.calls and self._state.serves_none(name, time.monotonic())

        self.wait(has_ended, 2 * self.lease)
        with suppress(ConfigError):  # somebody else has
            self.remove(name)

    def died(self, name: str, why: str = "its process has ended") -> None:
        """As whoever has started it sees: it is asked no more, until it is added again."""
        with self._changed:
            if (link := self._links.get(name)) is not None:
                link.http, link.pid = "", None
        self._feed(lambda now: self._state.died(name, now, why))

    def wait(self, condition: Callable[[], bool], timeout: float) -> bool:
        """Until ``condition()``, which is looked at after each thing that happens; whether it is
        true. ``EngineClosed`` where the fleet is closed meanwhile.
        """
        with self._changed:
            met = self._changed.wait_for(lambda: self._closing.is_set() or condition(), timeout)
            self._check_open()
            return met

    def wait_serving(self, count: int, timeout: float) -> None:
        """Until ``count`` members serve; ``DeadlineExceeded`` says why the others do not."""
        if not self.wait(lambda: len(self.serving()) >= count, timeout):
            raise DeadlineExceeded(
                f"{len(self.serving())} of {count} members serve after {timeout:g} s: {self.whys()}"
            )

    def serve(self) -> None:
        """The fleet begins, as it does with an update, too: returns when its members know, or would
        have left service. What ends before leaves engines that served alone to do so again.
        """
        with self._changed:
            serial = self._state.serial
            self._do(self._state.serve(time.monotonic()))
            self.wait(lambda: self._state.heard_of(serial, time.monotonic()), 2 * self.lease)

    @property
    def has_new(self) -> bool:
        """Whether a member has been added of which nothing is known yet."""
        with self._changed:
            return any(member.is_new for member in self._state.members.values())

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def quorum(self) -> int:
        return self._state.quorum

    def whys(self) -> str:
        with self._changed:
            return self._state.members.whys()

    def serving(self) -> list[Link]:
        with self._changed:
            return [self._links[name] for name in self._state.serving if name in self._links]

    def with_calls(self) -> list[Link]:
        with self._changed:
            members = self._state.members
            return [self._links[n] for n, m in members.items() if m.has_lease and n in self._links]

    def is_out(self, link: Link, life: int | None) -> bool:
        with self._changed:
            if self._closing.is_set() or self._links.get(link.name) is not link:
                return True
            ended = self._state.serves_none(link.name, time.monotonic())
            return ended or self.life(link.name) != life

    def links(self) -> list[Link]:
        with self._changed:
            return list(self._links.values())

    def life(self, name: str) -> int | None:
        with self._changed:
            member = self._state.members.get(name)
            standing = None if member is None else member.standing
            return None if standing is None else standing.epoch

    def members(self) -> list[dict[str, Any]]:
        with self._changed:
            rows = describe(self._state.members.values())
            return [{**row, **self._links[str(row["name"])].where} for row in rows]

    def standings(self) -> dict[str, Standing]:
        with self._changed:
            members = self._state.members
            found = ((name, members[name].standing) for name in self._state.serving)
            return {name: standing for name, standing in found if standing is not None}

    @property
    def promise(self) -> Promise:
        """What the fleet serves, and what a rollback leads to."""
        return self._state.promise

    @property
    def epoch(self) -> int:
        return self._state.promise.epoch

    @property
    def version(self) -> int:
        return self._state.promise.version

    @property
    def fleet_id(self) -> int:
        return self._state.promise.fleet

    @property
    def adapters(self) -> dict[str, int]:
        return {one.name: one.version for one in self._state.promise.adapters}

    @property
    def num_members(self) -> int:
        return len(self._links)

    # ---- an update, as a ``Transaction`` makes it ----

    def begin(
        self,
        update_id: str,
        version: int | None,
        timeout: float,
        *,
        back: bool = False,
        reversible: bool = True,
        joins: bool = False,
    ) -> tuple[list[Link], int]:
        """Once no other is under way; ``UpdateInProgress`` where that takes ``timeout`` seconds.

        A moment in which too few members serve, as after this process was stopped, is waited out;
        so is, within ``patience``, that of a member which is behind and will not join: where one
        update follows the next it would never be brought up to date.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            self.wait(lambda: not self._is_short, min(2 * self.lease, timeout))
            if not joins and not back:
                patience = min(max(self._patience * timeout, self.lease), timeout / 2)
                self.wait(lambda: self._may_begin and not self._brings_up, patience)
            self.wait(lambda: self._may_begin, deadline - time.monotonic())
            names, version = self._state.begin(
                update_id, version, time.monotonic(), back=back, reversible=reversible,
                joins=joins,
            )  # fmt: skip
            for link in self._links.values():
                link.joins = link.name in names and link.name not in self._state.serving
            self._ended[update_id] = Future()
            while len(self._ended) > KEPT:
                self._ended.pop(next(iter(self._ended)))
            return [self._links[name] for name in names], version

    def kept_out(self) -> list[str]:
        """Members that need a whole update; see the coordinator's."""
        with self._changed:
            return self._state.kept_out(time.monotonic())

    @contextmanager
    def committing(self) -> Iterator[None]:
        """While within, the fleet says that it is: an answer to the trainer is due."""
        with self._changed:
            self._commits += 1
        try:
            yield
        finally:
            with self._changed:
                self._commits -= 1
                self._changed.notify_all()

    @property
    def update_state(self) -> str:
        """As a member's ``WeightInfo.state``."""
        if self._commits:
            return "committing"
        return "idle" if self._state.idle else "staging"

    def outcome(self, update_id: str) -> Future[Ended]:
        return self._ended[update_id]

    def lost(self, update_id: str, name: str, why: str) -> None:
        self._feed(lambda now: self._state.lost(update_id, name, why, now))

    def voted(self, update_id: str, name: str, digest: int, adapters: Adapters) -> None:
        self._feed(lambda now: self._state.voted(update_id, name, digest, now, adapters))

    def commit(self, update_id: str) -> None:
        self._feed(lambda now: self._state.commit(update_id, now))

    def give_up(self, update_id: str, why: str) -> None:
        self._feed(lambda now: self._state.give_up(update_id, why, now))

    def each(
        self, links: Iterable[Link], fn: Callable[[Link], Any], update_id: str, timeout: float
    ) -> dict[str, Any]:
        """``fn`` of all at once: what it returned, or the error it raised, by name. Who has left
        the update is waited for no more, nor who is much later than half of them and a quorum; and
        nobody once it is over.
        """
        parts = {link.name: self._updating.submit(fn, link) for link in links}
        enough = max(self.quorum, len(parts) // 2)
        given_up = partial(self._given_up, update_id, frozenset(parts))
        patience = max(self._patience * timeout, self.lease)
        return late.results(parts, given_up, enough, patience)

    def unlike(self, info: WeightInfo) -> str:
        """Why an engine can be no member, as one of another model; "" where it can."""
        return self._errands.unlike(info)

    def later(self, fn: Callable[[], None]) -> None:
        """In a thread of those that updates have."""
        with suppress(RuntimeError):  # it is closed, and its links with it
            self._updating.submit(fn)

    def close(self) -> None:
        """Members go on serving until their leases are over."""
        self._closing.set()
        with self._changed:
            for outcome in self._ended.values():
                if not outcome.done():
                    outcome.set_exception(EngineClosed(_CLOSED))
            self._changed.notify_all()
        self._ticker.join(5.0)
        for pool in (self._pool, self._updating):
            pool.shutdown(wait=False, cancel_futures=True)
        with self._changed:
            for link in self._links.values():
                link.close()
        self.record.close()

    # ---- helpers ----

    def _given_up(self, update_id: str, names: frozenset[str]) -> dict[str, str] | None:
        """Of those members the ones that have no part in the update any more, and why; None where
        it is over.
        """
        if (outcome := self._ended.get(update_id)) is None or outcome.done():
            return None
        with self._changed:
            update = self._state.update
            return {} if update is None else {n: w for n, w in update.lost.items() if n in names}

    def _is_kept(self, link: Link, until: float) -> bool:
        """Whether one that leaves has something to stay for."""
        now = time.monotonic()
        return (now < until and self._has_calls(link)) or self._state.is_needed(link.name, now)

    def _has_calls(self, link: Link) -> bool:
        """Of this front, or, as the member says, of others."""
        member = self._state.members.get(link.name)
        if member is None or member.standing is None or not member.has_lease:
            return bool(link.calls)
        return bool(link.calls or member.standing.running or member.standing.waiting)

    @property
    def _may_begin(self) -> bool:
        return self._state.idle and not self._commits

    @property
    def _brings_up(self) -> bool:
        return self._state.brings_up(time.monotonic())

    @property
    def _is_short(self) -> bool:
        """Whether fewer members serve than a commit needs, though there are enough of them."""
        return len(self._state.serving) < self.quorum <= len(self._links)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise EngineClosed(_CLOSED)

    def _meet(self, link: Link) -> None:
        """Raise what is wrong with whoever answers there, if somebody does."""
        try:
            promise = self.promise
            standing = link.ask(Grant(fence=promise.fence, fleet=promise.fleet, epoch=None))
            why = self.unlike(link.control.info())
        except ConfigError:
            raise
        except RolloutError as error:
            log.info("member %s does not answer yet: %s", link.name, error)
            return
        if why:
            raise ConfigError(f"the engine at {link.client.address} can be no member: {why}")
        with self._changed:
            if twin := self._state.members.twin(link.name, standing.epoch):
                raise _is_member(link, twin)

    def _check_address(self, link: Link) -> None:
        where = split_address(link.client.address)
        for other in self._links.values():
            if split_address(other.client.address) == where:
                raise _is_member(link, other.name)

    @staticmethod
    def _let_go(link: Link, grant: Grant) -> None:
        if error := let_go(link, grant):
            log.info("member %s was let go without hearing of it: %s", link.name, error)

    def _set_quorum(self) -> None:
        self._state.quorum = self._quorum or min(2, max(1, self._state.members.staying))

    def _tick(self) -> None:
        while not self._closing.wait(self.lease / 8):
            try:
                self._feed(self._state.tick)
                with self._changed:
                    members, live = self._state.members.values(), self._state.promise
                    self._log.look(members, live, time.monotonic())
                    out = self._served & {m.name for m in members if not m.leaves}
                    self._served = set(self._state.serving)
                    self.members_lost += len(out - self._served)
            except Exception:
                log.exception("the fleet's coordinator failed")

    def _feed(self, event: Callable[[float], list[Action]]) -> None:
        with self._changed:
            if not self._closing.is_set():
                self._do(event(time.monotonic()))
                self._set_quorum()
            self._changed.notify_all()

    def _do(self, actions: Iterable[Action]) -> None:
        for action in actions:
            if isinstance(action, Ended):
                outcome = self._ended.get(action.update_id)
                if outcome is not None and not outcome.done():
                    outcome.set_result(action)
                continue
            self._pool.submit(self._errands.run, action)


def _no_member(name: str) -> ConfigError:
    return ConfigError(f"the fleet has no member {name!r:.80}")


def _is_member(link: Link, name: str) -> ConfigError:
    return ConfigError(
        f"the engine at {link.client.address} is member {name!r:.80} of this fleet already: name "
        "each engine once (to add one anew, remove it first)"
    )
