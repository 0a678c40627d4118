"""Engines that the front starts itself: so many of them run, and those that end are replaced."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from rollout.errors import ConfigError, DeadlineExceeded, EngineClosed, RolloutError
from rollout.fleet.fleet import Fleet
from rollout.fleet.launching.engine_process import START_LIMIT

log = logging.getLogger(__name__)
AGAIN_AFTER, AGAIN_AT_MOST = 1.0, 30.0  # seconds until one is started again
LASTED = 60.0  # seconds after which one that ends has not failed to start
END_WAIT = 20.0  # seconds in which threads end that have nothing to wait for
DRAIN = 60.0  # seconds for what runs where there are to be fewer
OF_NOTICE = 5.0  # seconds of one's notice for its end itself
_NAMED = "replica-"
LONGEST = 3600.0  # seconds for which one that leaves is waited for
SAYS = 30.0  # seconds between lines of the log on what has not started


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """``notice``: seconds that are left to it, where its end is announced (``inf``: nobody has said
    how many); None: it has ended.
    """

    why: str
    notice: float | None = None


class Replica(Protocol):
    """An engine that starts or runs. ``token``: by which it is reached. ``waits_for``: what keeps
    it from starting, "" for nothing. ``http``, ``pid``: see ``Link``; once it is ``ready``.
    """

    token: str
    waits_for: str

    @property
    def http(self) -> str: ...

    @property
    def pid(self) -> int | None: ...

    def ready(self) -> str:
        """Blocks; the address of its gRPC server. ``RolloutError`` where it has ended."""

    def wait(self) -> End:
        """Blocks until it has ended, or is about to."""

    def end(self) -> None:
        """In bounded time, and with all that it takes. Idempotent; unblocks the others."""


class Launcher(Protocol):
    """Where engines run."""

    def launch(self, name: str) -> Replica:
        """Does not block for long."""


class Replicas:
    """``count`` engines of one ``launcher``, members of ``fleet``; between ``least`` and ``most``
    of them as ``scale`` says. One that ends is started again, later each time it has not lasted.
    """

    def __init__(
        self,
        fleet: Fleet,
        launcher: Launcher,
        count: int,
        *,
        least: int = 1,
        most: int | None = None,
        enough: int | None = None,
        start_timeout: float = START_LIMIT,
        found: Sequence[str] = (),
    ) -> None:
        """``most``: None is ``count``. ``enough``: how many have to be ready within
        ``start_timeout`` seconds for ``start`` to return; None is all. ``found``: names of those
        that run already, at most ``most``; they are the first.
        """
        most = count if most is None else most
        if not 1 <= least <= count <= most:
            raise ConfigError(
                f"--replicas {count} is not between --min-replicas {least} (which is --quorum "
                f"where it is not given) and --max-replicas {most}, of which none is below 1"
            )
        self.least, self.most = least, most
        self._fleet, self._launcher, self._first = fleet, launcher, max(count, len(found))
        self._enough = count if enough is None else min(enough, count)
        self._start_timeout = start_timeout
        self._found = [*found]
        self._numbers = itertools.count(1 + max(map(_number, found), default=-1))
        self._wanted: dict[str, threading.Thread] = {}
        self._ended: list[threading.Thread] = []
        self._running: dict[str, Replica] = {}
        self._ready: set[str] = set()
        self._failure: BaseException | None = None
        self._starting = self._closing = False
        self._changed = threading.Condition(threading.RLock())

    def start(self) -> None:
        """Blocks until enough are ready. The first failure of one is raised, and what keeps them
        after ``start_timeout`` (``DeadlineExceeded``); either ends the others.
        """
        deadline = time.monotonic() + self._start_timeout
        self._starting = True
        try:
            self.scale(self._first)
            with self._changed:
                while not self._changed.wait_for(
                    self._is_decided, min(SAYS, max(deadline - time.monotonic(), 0.0))
                ):
                    if time.monotonic() >= deadline:
                        raise DeadlineExceeded(
                            f"{self._few()} after start_timeout="
                            f"{self._start_timeout:g} s: {self.whys()}"
                        )
                    log.warning("%s: %s", self._few(), self.whys())
                self._starting = False
                if self._failure is not None:
                    raise self._failure
                if self._closing:
                    raise EngineClosed("the fleet was closed while it started")
        except BaseException:
            self.close()
            raise

    @property
    def count(self) -> int:
        """How many there are to be."""
        return len(self._wanted)

    def scale(self, count: int) -> None:
        """Have ``count`` of them, which takes its time: new ones get the live weights from another
        before they serve, and of those that are too many the last leave the fleet and end: first
        those that serve nobody yet.
        """
        if not self.least <= count <= self.most:
            raise ConfigError(
                f"{count} replicas: this fleet may have {self.least} to {self.most}, as it was "
                "started with --min-replicas and --max-replicas"
            )
        with self._changed:
            while len(self._wanted) < count:
                self._add()
            serving = {link.name for link in self._fleet.serving()}
            while len(self._wanted) > count:
                # Who does not run yet gives up nothing.
                order = {n: (n in self._ready, n in serving, -_number(n)) for n in self._wanted}
                fewer = End(why="there are fewer replicas now", notice=DRAIN)
                self._spare(min(order, key=order.__getitem__), fewer)

    def replace(self, name: str, notice: float) -> bool:
        """Have another in the place of ``name``, which leaves within ``notice`` seconds, and ends:
        returns when it has. False: ``name`` is none of these.
        """
        with self._changed:
            if name not in self._wanted:
                return False
            self._add()
            leaving = self._spare(name, End(why="it was let go", notice=notice + OF_NOTICE))
        leaving.join(LONGEST)
        return True

    def whys(self) -> str:
        """What keeps those that are not ready."""
        with self._changed:
            rows = self.starting()
        return "; ".join(f"{name}: {why or 'it is loading'}" for name, why in rows.items())

    def starting(self) -> dict[str, str]:
        """Those that are not ready, and what for they wait."""
        with self._changed:
            late = [name for name in self._wanted if name not in self._ready]
            return {
                name: self._running[name].waits_for if name in self._running else ""
                for name in late
            }

    def describe(self) -> dict[str, Any]:
        """For people."""
        return {
            "count": self.count, "min": self.least, "max": self.most, "starting": self.starting(),
        }  # fmt: skip

    def close(self) -> None:
        """End all. Idempotent."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            running = list(self._running.values())
            threads = [*self._wanted.values(), *self._ended]
        if running:
            with ThreadPoolExecutor(len(running)) as pool:
                list(pool.map(lambda replica: replica.end(), running))
        for thread in threads:
            thread.join(END_WAIT)

    # ---- helpers ----

    @property
    def _needed(self) -> int:
        return min(self._enough, self.count)  # there may be fewer by now

    def _is_decided(self) -> bool:
        ready = len(self._ready) >= self._needed
        return self._closing or self._failure is not None or ready

    def _few(self) -> str:
        return f"{len(self._ready)} of {self.count} replicas are ready, {self._needed} are needed"

    def _add(self) -> None:
        name = self._found.pop(0) if self._found else f"{_NAMED}{next(self._numbers)}"
        self._wanted[name] = self._thread(name, lambda: self._keep(name))

    def _spare(self, name: str, end: End) -> threading.Thread:
        """``name`` is wanted no more, and ends when it has left the fleet; whoever sees to it."""
        self._ended = [thread for thread in self._ended if thread.is_alive()]
        leaving = self._thread(name, lambda: self._let_go(name, end))
        self._ended += [self._wanted.pop(name), leaving]
        self._changed.notify_all()
        return leaving

    def _thread(self, name: str, target: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=target, name=f"rollout-{name}", daemon=True)
        thread.start()
        return thread

    def _is_over(self, name: str) -> bool:
        failed = self._starting and self._failure is not None  # which ends them all
        return failed or self._closing or name not in self._wanted

    def _keep(self, name: str) -> None:
        """Have ``name`` run for as long as it is wanted."""
        pause = AGAIN_AFTER
        while True:
            began = time.monotonic()
            end = self._run(name)
            with self._changed:
                if self._is_over(name):
                    return
                if end.notice is not None:  # another is started at once, where it will stay
                    log.warning("%s: %s; another is started", name, end.why)
                    self._add()
                    self._spare(name, end)
                    return
                lasted = time.monotonic() - began > LASTED
                pause = AGAIN_AFTER if lasted else min(2 * pause, AGAIN_AT_MOST)
                log.error("%s: %s; another is started in %g s", name, end.why, pause)
                if self._changed.wait_for(lambda: self._is_over(name), pause):
                    return

    def _run(self, name: str) -> End:
        """Once, until its end or the notice of it."""
        replica: Replica | None = None
        end = End(why="it was not started")
        try:
            replica = self._launcher.launch(name)
            with self._changed:
                self._running[name] = replica
                over = self._is_over(name)
            if over:
                return end
            address = replica.ready()
            with self._changed:
                if self._is_over(name):
                    return end
                self._fleet.add(address, replica.token, name, http=replica.http, pid=replica.pid)
                self._ready.add(name)
                self._changed.notify_all()
            end = replica.wait()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is started again
            end = End(why=str(error) or type(error).__name__)
            with self._changed:
                if self._starting and self._failure is None and not self._is_over(name):
                    self._failure = error
                    self._changed.notify_all()
        finally:
            if end.notice is None:
                self._gone(name, replica, end.why)
        return end

    def _gone(self, name: str, replica: Replica | None, why: str) -> None:
        if replica is not None:
            with suppress(Exception):  # of what has ended, or cannot be reached
                replica.end()
        with self._changed:
            self._running.pop(name, None)
            if name in self._ready:
                self._ready.discard(name)
                with suppress(RolloutError):
                    self._fleet.died(name, why)

    def _let_go(self, name: str, end: End) -> None:
        """Out of the fleet, once what runs there has ended and others serve what is live, and then
        ended.
        """
        with self._changed:
            replica = self._running.get(name)
            was_ready = name in self._ready
            self._ready.discard(name)
        until = time.monotonic() + min(max((end.notice or 0.0) - OF_NOTICE, 0.0), LONGEST)

        def may_leave() -> bool:
            others = any(link.name != name for link in self._fleet.serving())
            return self._closing or not was_ready or others

        with suppress(RolloutError):  # the fleet was closed, or it was no member yet
            self._fleet.wait(may_leave, until - time.monotonic())
            self._fleet.leave(name, max(until - time.monotonic(), 0.0))
        self._gone(name, replica, end.why)


def is_name(name: str) -> bool:
    """Whether a replica has it, or may have."""
    return name.startswith(_NAMED) and name[len(_NAMED) :].isdecimal()


def _number(name: str) -> int:
    return int(name[len(_NAMED) :])
