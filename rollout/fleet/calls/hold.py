"""What a fleet's front holds its members in, paused or asleep, whichever serve at that moment."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout.config import DEFAULT_TIMEOUT
from rollout.engine.control import ASLEEP, WAKE_TAGS
from rollout.errors import EngineClosed, RolloutError
from rollout.fleet.calls.taken import is_taken
from rollout.fleet.coordination.held import Held
from rollout.fleet.coordination.record import Record
from rollout.fleet.directory import Directory
from rollout.fleet.link import Link
from rollout.generation.metrics import EngineStats
from rollout.rpc.client import RolloutClient

Verb = Callable[[RolloutClient], Awaitable[None]]
log = logging.getLogger(__name__)


class Holding(ABC):
    """What a front's calls go by: ``wanted``, for the event loop of that front."""

    wanted: Held

    def check(self) -> None:
        """Raise what an engine says to a request while all are asleep."""
        if self.wanted.asleep:
            raise EngineClosed(ASLEEP)

    @abstractmethod
    async def reach(self, link: Link) -> None:
        """Return once a member is held as all are; raises what its verbs raise."""

    @abstractmethod
    async def pause(self, mode: str, timeout: float) -> None: ...

    @abstractmethod
    async def resume(self) -> None: ...

    @abstractmethod
    async def sleep(self, level: int, mode: str, timeout: float) -> None: ...

    @abstractmethod
    async def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None: ...

    @abstractmethod
    async def reset_prefix_cache(self, reset_running_requests: bool) -> None: ...


class Hold(Holding):
    """The fleet's own. A verb goes to all members; those that serve have to take it, unless they
    can serve no more, and whoever has missed it is brought to it by ``reach``, before its next
    call. What was taken is in ``record``, where there is one.
    """

    def __init__(self, fleet: Directory, record: Record | None = None) -> None:
        self.wanted = Held()
        self._fleet, self._record = fleet, record

    async def find(self) -> None:
        """What an earlier front has left the fleet in goes on, whatever members have missed it."""
        if self._record is not None and self._record.held is not None:
            self.wanted = self._record.held
        else:  # nobody has written it, as an earlier version did not
            await self._find_at_members()
            if self.wanted.state:
                await self._keep()
        if self.wanted.state:
            log.info("the fleet is %s, as an earlier front left it", self.wanted.state)

    async def pause(self, mode: str, timeout: float) -> None:
        wanted = replace(self.wanted, paused=True)
        await self._or_as_before(wanted, lambda client: client.pause(mode, timeout))

    async def resume(self) -> None:
        await self._all(replace(self.wanted, paused=False), lambda client: client.resume())

    async def sleep(self, level: int, mode: str, timeout: float) -> None:
        wanted = replace(self.wanted, asleep=frozenset(WAKE_TAGS))
        await self._or_as_before(wanted, lambda client: client.sleep(level, mode, timeout))

    async def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        asleep = self.wanted.asleep.difference(WAKE_TAGS if tags is None else tags)
        wanted = replace(self.wanted, asleep=asleep)
        await self._all(wanted, lambda client: client.wake_up(tags, timeout))

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        serving = self._fleet.serving()
        for link in self._fleet.links():
            link.uncleared = link.uncleared or link not in serving

        async def one(link: Link) -> None:
            asked = link.client.reset_prefix_cache(reset_running_requests)
            link.uncleared = not await self._is_taken(link, asked)

        await _all_of(map(one, serving))

    def is_reached(self, link: Link) -> bool:
        """Whether a member has taken all verbs that it was to take, or is about to."""
        return bool(link.verbs) or self._is_held(link)

    async def reach(self, link: Link) -> None:
        while link.verbs or not self._is_held(link):
            if link.verbs:  # as a pause that waits for what runs
                await asyncio.wait(link.verbs)
            elif link.uncleared:
                await link.client.reset_prefix_cache(False)
                link.uncleared = False
            else:
                await self._do(link, partial(_bring, self.wanted), whole=True)

    # ---- helpers ----

    def _is_held(self, link: Link) -> bool:
        here = self._fleet.life(link.name), self.wanted
        return link.held == here and not link.uncleared

    async def _is_taken(self, link: Link, asked: Coroutine[Any, Any, None]) -> bool:
        """See ``is_taken``; in the life that it has now."""
        out = partial(self._fleet.is_out, link, self._fleet.life(link.name))
        return await is_taken(asked, out, self._fleet.lease)

    async def _find_at_members(self) -> None:
        states = {standing.state for standing in self._fleet.standings().values()}
        if states == {"asleep"}:
            paused = await self._are_paused()
            self.wanted = Held(paused=paused, asleep=frozenset(WAKE_TAGS))
        elif states == {"paused"}:
            self.wanted = Held(paused=True)

    async def _keep(self) -> None:
        """What is wanted by the time that it is written: verbs may overlap."""
        if self._record is not None:
            await asyncio.to_thread(self._record.hold, lambda: self.wanted)

    async def _are_paused(self) -> bool:
        """Whether all that serve are, whatever their state says beside it."""
        asked = (link.client.stats() for link in self._fleet.serving())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        told = [one.paused for one in answers if isinstance(one, EngineStats)]
        return bool(told) and all(told)

    async def _or_as_before(self, wanted: Held, verb: Verb) -> None:
        """Where one that serves does not take it, the others go on as before, too."""
        before = self.wanted
        try:
            await self._all(wanted, verb)
        except BaseException:
            if self.wanted is wanted:
                self.wanted = before
                links = self._fleet.serving()
                back = (self._is_taken(link, self.reach(link)) for link in links)
                await asyncio.gather(*back, self._keep(), return_exceptions=True)
            raise

    async def _all(self, wanted: Held, verb: Verb) -> None:
        before, self.wanted = self.wanted, wanted
        serving = {link.name for link in self._fleet.serving()}

        async def one(link: Link) -> None:
            whole = link.held == (self._fleet.life(link.name), before)
            if link.name in serving:
                await self._is_taken(link, self._do(link, verb, whole=whole))
                return
            with contextlib.suppress(RolloutError, TimeoutError):
                await asyncio.wait_for(self._do(link, verb, whole=whole), self._fleet.lease)

        await _all_of(map(one, self._fleet.links()))
        await self._keep()

    async def _do(self, link: Link, verb: Verb, *, whole: bool) -> None:
        """``whole``: a member that has taken it is held as is wanted now."""
        life, wanted = self._fleet.life(link.name), self.wanted
        whole, link.held = whole and not link.verbs, None
        task = asyncio.ensure_future(verb(link.client))
        link.verbs.add(task)
        try:
            await task
        finally:
            link.verbs.discard(task)
        if whole and not link.verbs and self.wanted is wanted:
            link.held = life, wanted


async def _all_of(calls: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Once all have ended; raises what the first of them does."""
    for answer in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer


async def _bring(wanted: Held, client: RolloutClient) -> None:
    if wanted.paused:
        await client.pause("keep", DEFAULT_TIMEOUT)
    else:
        await client.resume()
    if wanted.asleep:
        await client.sleep(1, "keep", DEFAULT_TIMEOUT)
    if awake := [tag for tag in WAKE_TAGS if tag not in wanted.asleep]:
        await client.wake_up(awake, DEFAULT_TIMEOUT)
