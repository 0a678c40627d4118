"""A fleet as a front knows it that routes only: what the coordinating front has told last."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rollout.distributed import is_loopback
from rollout.errors import ConfigError, DeadlineExceeded, EngineClosed, RolloutError
from rollout.fleet.coordination.actions import MAX_LEASE
from rollout.fleet.coordination.held import Held
from rollout.fleet.coordination.member import Status
from rollout.fleet.directory import Directory
from rollout.fleet.link import LOOK_AGAIN, Link
from rollout.rpc.address import split_address
from rollout.rpc.client import RolloutClient
from rollout.rpc.tls import ClientTls, ServerTls
from rollout.weight_sync.protocol.membership import AskRoutes, Route, Routes, Standing

log = logging.getLogger(__name__)
ASKED = 2.0  # seconds for which a question waits for something new
ANSWERS = 2.0  # seconds more until it has not answered
PAUSE = 0.5  # seconds between questions while nobody answers
_OUT = ("fenced", "leaving", "dead", "closed")  # states in which an engine takes no calls
_SERVE_NONE = (Status.JOINING, Status.FENCED, Status.LEFT)
_ROUTES_ONLY = (
    "this front routes only: members come and go at the front that coordinates, which `rollout "
    "fleet --coordinator` names"
)
SILENT = 2 * ASKED  # seconds without a word, for which its last one counts


class RoutedFleet(Directory):
    """Asks the front that ``coordinator`` reaches all the time, and goes by its last word for
    ``SILENT`` seconds: what may not serve any more refuses by itself (its lease, and whose it is).

    ``shown``: this front's own certificate, for members that ask for one.
    """

    def __init__(self, coordinator: RolloutClient, shown: ServerTls | None = None) -> None:
        self.lease, self.parted = 2.0, 0  # until it is told
        self.coordinator, self._shown = coordinator, shown
        self._told: Routes | None = None
        self._routes: dict[str, Route] = {}
        self._links: dict[str, Link] = {}
        self._heard = time.monotonic()
        self._problem: RolloutError | None = None  # of the last question
        self._looked = float("-inf")
        self._watcher: Callable[[Held], None] = lambda held: None
        self._changed = threading.Condition(threading.RLock())
        self._closing = threading.Event()
        self._asker = threading.Thread(target=self._ask, name="rollout-fleet-routes", daemon=True)
        self._asker.start()

    def watch(self, watcher: Callable[[Held], None]) -> None:
        """``watcher`` is told what members are held in, now and whenever that is told anew."""
        with self._changed:
            self._watcher = watcher
            if self._told is not None:
                watcher(_held(self._told))

    def wait_serving(self, timeout: float) -> None:
        """Until a member serves; ``DeadlineExceeded`` says what is missing, ``ConfigError`` what is
        wrong with the coordinating front.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self.serving():
                if self.closed:
                    raise EngineClosed("the front was closed while it started")
                if self._told is None and isinstance(self._problem, ConfigError):
                    raise self._problem
                if (left := deadline - time.monotonic()) <= 0:
                    raise DeadlineExceeded(
                        f"no member of the fleet serves after {timeout:g} s: {self.whys()}"
                    )
                self._changed.wait(min(left, 1.0))

    def refresh(self) -> None:
        """Ask now, as after something was changed through this front. Blocks for a moment."""
        with contextlib.suppress(RolloutError):
            self._take(self.coordinator.routes(AskRoutes(), ANSWERS))

    # ---- as a directory ----

    @property
    def closed(self) -> bool:
        return self._closing.is_set()

    @property
    def fleet_id(self) -> int:
        return 0 if self._told is None else self._told.fleet

    @property
    def epoch(self) -> int:
        return 0 if self._told is None else self._told.epoch

    @property
    def version(self) -> int:
        return 0 if self._told is None else self._told.version

    @property
    def adapters(self) -> Mapping[str, int]:
        return {} if self._told is None else self._told.adapters

    def links(self) -> list[Link]:
        with self._changed:
            return list(self._links.values())

    def serving(self) -> list[Link]:
        """Those that were told to, unless they report otherwise since."""
        with self._changed:
            return [self._links[r.name] for r in self._routes.values() if not self._why_not(r)]

    def with_calls(self) -> list[Link]:
        with self._changed:
            told = self._routes.values()
            return [self._links[r.name] for r in told if r.status not in _SERVE_NONE]

    def standings(self) -> dict[str, Standing]:
        with self._changed:
            return {link.name: _standing(self._routes[link.name], link) for link in self.serving()}

    def life(self, name: str) -> int | None:
        with self._changed:
            route = self._routes.get(name)
            return None if route is None else route.life

    def members(self) -> list[dict[str, Any]]:
        names = ("name", "status", "state", "version", "running", "waiting")
        with self._changed:
            return [
                {
                    **{n: getattr(r, n) for n in names}, "why": r.why or self._why_not(r),
                    **self._links[r.name].where,
                }
                for r in self._routes.values()
            ]  # fmt: skip

    def add(
        self,
        address: str,
        token: str | None = None,
        name: str | None = None,
        *,
        tls_server_name: str | None = None,
        ask: bool = False,
    ) -> str:
        raise ConfigError(_ROUTES_ONLY)

    def leave(self, name: str, notice: float) -> None:
        raise ConfigError(_ROUTES_ONLY)

    def is_silent(self) -> bool:
        """Whether the coordinating front's last word counts no more."""
        return bool(self._silence)

    def whys(self) -> str:
        with self._changed:
            out = {route.name: self._why_not(route) for route in self._routes.values()}
            told = [f"{name}: {why}" for name, why in out.items() if why]
            return self._silence or "; ".join(told)

    def close(self) -> None:
        self._closing.set()
        self.coordinator.close()
        self._asker.join(5.0)
        with self._changed:
            self._changed.notify_all()
            for link in self._links.values():
                link.close()

    # ---- helpers ----

    def _why_not(self, route: Route) -> str:
        """Why a member gets no calls; "" where it does.

        Without the coordinating front's word nobody knows for long that the fleet is this one.
        """
        if self._silence:
            return "the coordinating front does not answer"
        if not route.serves:
            return route.why or route.status or "it is not held as the others are"
        report = self._links[route.name].report
        if report is None:
            return ""
        if report.epoch != route.life or report.fleet != self.fleet_id:
            return "it was started anew, or let go"
        return f"it is {report.state}" if report.state in _OUT else ""

    @property
    def _silence(self) -> str:
        """Since when the coordinating front has said nothing, and why; "" where it has."""
        silent = time.monotonic() - self._heard
        if self._told is not None and silent < SILENT:
            return ""
        why = "" if self._problem is None else f" ({self._problem})"
        return (
            f"the coordinating front at {self.coordinator.address}, which lets members "
            f"serve, has not answered for {silent:.0f} s{why}"
        )

    def _ask(self) -> None:
        while not self._closing.is_set():
            seen = 0 if self._told is None else self._told.serial
            try:
                ask = AskRoutes(seen=seen, wait=ASKED)
                self._take(self.coordinator.routes(ask, ASKED + ANSWERS))
            except RolloutError as error:
                self._failed(error)
                self._closing.wait(PAUSE)
            except Exception:
                log.exception("what the coordinating front has told could not be taken")
                self._closing.wait(PAUSE)

    def _failed(self, error: RolloutError) -> None:
        was_heard, found = self._problem is None, error
        if was_heard and not self.closed:
            log.warning("the coordinating front does not answer: %s", error)
        if isinstance(error, EngineClosed):
            if time.monotonic() - self._looked <= LOOK_AGAIN:
                found = self._problem or error  # what was found then
            else:
                self._looked = time.monotonic()
                if why := self.coordinator.problem():
                    why = why.replace("--tls-", "--coordinator-tls-")
                    found = ConfigError(f"cannot talk to {self.coordinator.address}: {why}")
        with self._changed:
            self._problem = found
            self._changed.notify_all()

    def _take(self, told: Routes) -> None:
        if not 0 < told.lease <= MAX_LEASE:
            raise ConfigError(f"the coordinating front tells of leases of {told.lease:g} s")
        with self._changed:
            old = self._told
            same = old is not None and old.fleet == told.fleet
            if old is not None and same and (told.fence, told.serial) < (old.fence, old.serial):
                return  # it was overtaken, or is of one that another has replaced
            now = time.monotonic()
            if self._problem is not None:
                silent = now - self._heard
                log.warning("the coordinating front answers, after %.1f s without a word", silent)
            self._heard, self._problem = now, None
            self._told, self.lease = told, told.lease
            self.parted = told.version  # how its update went was not told: it may be one
            before, self._routes = self._routes, {route.name: route for route in told.members}
            for name in before.keys() | self._routes.keys():
                self._connect(name, before.get(name))
            self._watcher(_held(told))
            self._changed.notify_all()

    def _connect(self, name: str, before: Route | None) -> None:
        """A link to where the member is now."""
        route = self._routes.get(name)
        if route is not None and before is not None and _way(route) == _way(before):
            return
        if (old := self._links.pop(name, None)) is not None:
            old.close()
        if route is None:
            return
        try:
            (theirs, _), (its, _) = map(split_address, (self.coordinator.address, route.address))
            if is_loopback(its) and not is_loopback(theirs):
                raise ConfigError(
                    f"{route.address} is the coordinating front's own host's alone: start this "
                    "front there, with --coordinator 127.0.0.1:PORT"
                )
            tls = ClientTls.of_peer(route.tls_ca, route.tls_server_name, self._shown)
            self._links[name] = Link.to(route.address, route.token or None, name, self.lease, tls)
        except ConfigError as error:
            log.warning("member %s cannot be reached: %s", name, error)
            del self._routes[name]


def _standing(route: Route, link: Link) -> Standing:
    """By its own word, or else by what was told of it."""
    told = link.report or route
    return Standing(
        epoch=route.life or 0, clock=0.0, version=told.version or 0, state=told.state or "",
        running=told.running or 0, waiting=told.waiting or 0, kv_usage=told.kv_usage,
    )  # fmt: skip


def _way(route: Route) -> tuple[str, ...]:
    return route.address, route.token, route.tls_ca, route.tls_server_name


def _held(told: Routes) -> Held:
    return Held(paused=told.paused, asleep=frozenset(told.asleep))
