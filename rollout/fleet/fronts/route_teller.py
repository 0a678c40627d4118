"""The coordinating front tells others of its fleet, which route only, who serves."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import suppress

from rollout.config import DEFAULT_TIMEOUT
from rollout.errors import RolloutError
from rollout.fleet.calls.hold import Hold
from rollout.fleet.fleet import Fleet
from rollout.fleet.link import Link
from rollout.weight_sync.protocol.membership import AskRoutes, Route, Routes, SendTo

log = logging.getLogger(__name__)
LONGEST = 5.0  # seconds for which an answer is put off that has nothing new
FORGOTTEN = 60.0  # seconds without a question, from which on no other front is counted on
LOOKS = 32  # in a lease, at whether there is something


class RouteTeller:
    """For the event loop of its front, whose members' ``hold`` is one for all fronts.

    A member that has missed a verb is brought to it here, before others are told that it serves.
    """

    def __init__(self, fleet: Fleet, hold: Hold) -> None:
        self._fleet, self._hold = fleet, hold
        self._serial, self._told = 0, object()
        self.begins = False  # whether it is known what members are held in
        self._asked = float("-inf")
        self._bringing: dict[str, asyncio.Task[None]] = {}
        self._ways: dict[str, tuple[Link, SendTo]] = {}  # an authority is read once

    async def answer(self, ask: AskRoutes) -> Routes:
        """Once there is something that ``ask.seen`` did not have, or after ``ask.wait`` seconds."""
        self._asked = time.monotonic()
        until = self._asked + min(ask.wait, LONGEST)
        while True:
            found = self._look()
            if found.serial != ask.seen or time.monotonic() >= until or self._fleet.closed:
                return found
            await asyncio.sleep(self._fleet.lease / LOOKS)

    @property
    def is_asked(self) -> bool:
        """Whether there are other fronts."""
        return time.monotonic() - self._asked < FORGOTTEN

    def close(self) -> None:
        for task in self._bringing.values():
            task.cancel()

    # ---- helpers ----

    def _look(self) -> Routes:
        fleet, wanted = self._fleet, self._hold.wanted
        promise, links = fleet.promise, {link.name: link for link in fleet.links()}
        serving = {x.name for x in fleet.serving() if self._is_held(x)} if self.begins else set()
        self._ways = {name: way for name, way in self._ways.items() if links.get(name) is way[0]}
        standings, members = fleet.standings(), []
        for row in fleet.members():
            if (link := links.get(str(row["name"]))) is None:
                continue
            for own in ("address", "http", "pid"):
                del row[own]
            standing, way = standings.get(link.name), self._way(link)
            if not self.begins:
                row = {**row, "why": row["why"] or "the coordinating front has not begun yet"}
            members.append(
                Route(
                    **row, address=way.address, token=way.token, tls_ca=way.tls_ca,
                    tls_server_name=way.tls_server_name, serves=link.name in serving,
                    life=fleet.life(link.name),
                    kv_usage=0.0 if standing is None else standing.kv_usage,
                )
            )  # fmt: skip
        decides = (
            promise.fence, promise.epoch, promise.version, promise.adapters, wanted,
            [(m.name, m.address, m.serves, m.life, m.status, m.state) for m in members],
        )  # fmt: skip
        if decides != self._told:
            self._serial, self._told = self._serial + 1, decides
        return Routes(
            serial=self._serial, fleet=promise.fleet, fence=promise.fence, epoch=promise.epoch,
            version=promise.version, lease=fleet.lease, paused=wanted.paused,
            asleep=tuple(sorted(wanted.asleep)), adapters=fleet.adapters, members=tuple(members),
        )  # fmt: skip

    def _way(self, link: Link) -> SendTo:
        if link.name not in self._ways:
            self._ways[link.name] = link, link.sending(0, 0.0)
        return self._ways[link.name][1]

    def _is_held(self, link: Link) -> bool:
        """Whether calls may go there; where a verb was missed, once it has been made up for."""
        if link.name in self._bringing:
            return False
        if self._hold.is_reached(link):
            return True
        task = asyncio.create_task(self._bring(link))
        self._bringing[link.name] = task
        task.add_done_callback(lambda _: self._bringing.pop(link.name, None))
        return False

    async def _bring(self, link: Link) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(DEFAULT_TIMEOUT):
                try:
                    await self._hold.reach(link)
                except RolloutError as error:
                    log.info("member %s is not held as the others are: %s", link.name, error)
                    await asyncio.sleep(self._fleet.lease / 4)
