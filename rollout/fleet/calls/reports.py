"""What members report of other fronts' calls: a front's router and loads are told."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import numpy as np

from rollout.engine.requests.recent_beginnings import ENTRY, MOST
from rollout.errors import RolloutError, TransferFailed
from rollout.fleet.calls.beginning import WIDTH
from rollout.fleet.calls.router import Router
from rollout.fleet.directory import Directory
from rollout.fleet.link import Link
from rollout.weight_sync.protocol.membership import AskReport, Report

log = logging.getLogger(__name__)
OFTEN = 8  # in a lease


class Reports:
    """Asks members that know of reports, each by itself, for as long as others route as well.

    In the event loop of its front. ``others_route``: whether there are other fronts.
    """

    def __init__(
        self, fleet: Directory, router: Router, others_route: Callable[[], bool] = lambda: True
    ) -> None:
        self._fleet, self._router, self._others_route = fleet, router, others_route
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        tasks = [*self._asking.values(), *((self._task,) if self._task is not None else ())]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self) -> None:
        while not self._fleet.closed:
            for link in self._fleet.links():
                if not self._others_route():
                    link.others, link.report = 0, None
                elif (last := self._asking.get(link.name)) is None or last.done():
                    self._asking[link.name] = asyncio.create_task(self._ask(link))
            await asyncio.sleep(self._fleet.lease / OFTEN)

    async def _ask(self, link: Link) -> None:
        """Nothing is known, in the end, of a member that does not answer."""
        try:
            async with asyncio.timeout(self._fleet.lease / 2):
                await link.client.start()
                while "fronts" in link.client.features and await self._take(link):
                    pass
        except (RolloutError, TimeoutError) as error:
            link.others, link.report = 0, None
            log.debug("member %s does not report: %s", link.name, error)

    async def _take(self, link: Link) -> bool:
        """Whether there is more to ask for."""
        last, asked, ours = link.report, time.monotonic(), link.calls
        ask = AskReport() if last is None else AskReport(life=last.epoch, since=last.serial)
        report = await link.client.report(ask, self._fleet.lease / 2)
        entries = entries_of(report)
        if last is not None and last.epoch != report.epoch:
            self._router.forget(link.name)
        # Of this front those that are on their way may be missing there, or have ended here.
        link.others = max(0, report.calls - max(ours, link.calls))
        link.report = report
        whens = (asked - entries["age"].astype(float)).tolist()
        raw = entries["digest"].tobytes()
        digests = (raw[n : n + WIDTH] for n in range(0, len(raw), WIDTH))
        self._router.learn(link.name, zip(digests, whens, strict=True))
        return len(entries) == MOST


def entries_of(report: Report) -> np.ndarray:
    """Checked: [n] of ``ENTRY``."""
    if len(report.beginnings) % ENTRY.itemsize:
        raise TransferFailed(f"a report of {len(report.beginnings)} bytes holds no whole digests")
    entries = np.frombuffer(report.beginnings, ENTRY)
    ages = entries["age"]
    if not (np.isfinite(ages) & (ages >= 0)).all():
        raise TransferFailed("a report tells of beginnings that are yet to come")
    return entries
