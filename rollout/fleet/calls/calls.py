"""The calls of a fleet's clients: each prompt on a member, and on another where that one fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import grpc

from rollout.engine.serving_lease import LEAVING
from rollout.errors import EngineClosed, EngineError
from rollout.fleet.calls.call import FleetCall, Outputs
from rollout.fleet.calls.hold import Holding
from rollout.fleet.calls.lost import LOST, Lost
from rollout.fleet.calls.router import Router, load_of
from rollout.fleet.directory import Directory
from rollout.fleet.link import Link
from rollout.generation import RequestOutput
from rollout.rpc.status import is_typed

log = logging.getLogger(__name__)
TRIES = 3  # members that one prompt may be lost with
PATIENCE = 2.0  # leases for which a call waits for a member that serves


class Calls:
    """Runs calls over a fleet's members.

    The prompts of a call go to members each by itself; one whose member fails goes on elsewhere,
    behind the tokens that were delivered of it.
    """

    def __init__(self, fleet: Directory, hold: Holding) -> None:
        self._fleet, self._hold, self.router = fleet, hold, Router()
        self._running: set[_Running] = set()
        self.closing = False  # no new ones are taken

    @property
    def running(self) -> int:
        return len(self._running)

    def abort(self, request_ids: Collection[str] | None) -> int:
        """These requests, or all, that wait here; how many. Members end those that they have."""
        return sum(running.call.abort(request_ids) for running in list(self._running))

    def end(self, error: EngineError) -> None:
        """All that run."""
        for running in list(self._running):
            running.end(error)

    async def run(self, call: FleetCall) -> Outputs:
        """All prompts' outputs as they come; rows of one member are one call there.

        Outputs are cumulative: of those that nobody has read yet the newest of each row is kept.
        """
        if not call.prompts:
            return
        self._hold.check()
        if self.closing:
            raise EngineClosed(LEAVING)
        call.fleet = self._fleet.fleet_id
        running = _Running(call)
        self._running.add(running)
        try:
            if not self._loads(set()):
                await self._somebody(self._patience, Lost(self._fleet), call, call.left)
            shares = self._shares(call, sorted(call.left), set())
            # One member's are read where they are wanted: another task would cost each token one.
            outputs = [self._served(call, *share) for share in shares.items()]
            merged = outputs[0] if len(outputs) == 1 else _merged(outputs)
            async with contextlib.aclosing(merged):
                with running:
                    async for item in merged:
                        running.leaves_off()
                        yield item
                        running.goes_on()
        finally:
            self._running.discard(running)

    def _shares(
        self, call: FleetCall, rows: Sequence[int], without: set[str]
    ) -> dict[str, list[int]]:
        """Which member gets which rows; ``EngineClosed`` where no other serves. Aborted ones end
        without one.
        """
        if call.is_aborted(rows):
            return {"": list(rows)}
        loads = self._loads(without)
        if not loads:
            self._fleet.one()  # says why none does
            raise EngineClosed("no other member of the fleet serves")
        shares: dict[str, list[int]] = {}
        for row in rows:
            params = call.params[row]
            extra = float(params.n)
            name = self.router.place(call.beginning(row), loads, extra, params.max_tokens)
            loads[name] += extra
            shares.setdefault(name, []).append(row)
        return shares

    async def _served(self, call: FleetCall, name: str, rows: list[int]) -> Outputs:
        """The outputs of ``rows``; those of a member that fails come from others, where each goes
        on behind what was delivered of it. Where no other serves, one is waited for.
        """
        lost = Lost(self._fleet)
        refused: set[str] = set()
        until: float | None = None
        todo = [(name, rows)]
        while todo:
            name, share = todo.pop()
            life, begun_at = self._fleet.life(name), time.monotonic()
            # This share may have waited for another one's end.
            call.forget(self._fleet.epoch, self._fleet.version, self._fleet.parted)
            try:
                link = None if call.is_aborted(share) else await self._met(name)
                for ended in call.ended(share, self._fleet.epoch):
                    yield ended
                share = [row for row in share if row in call.left]
                if link is None or not share:
                    continue
                async with (
                    _calling(link, call, share),
                    contextlib.aclosing(call.outputs(link.client, share)) as got,
                ):
                    async for index, output in got:
                        row, until = share[index], None
                        output = call.delivered(row, output, self._fleet.epoch)
                        if call.stream or output.finished:
                            yield row, output
            except LOST as error:
                again = [row for row in share if row in call.left]
                if again:
                    self._hold.check()  # it did as it was told
                self.router.forget(name)
                if _has_refused(error):
                    refused.add(name)
                else:
                    lost.add(name, life)
                if not again:
                    continue  # all that it had to say was said
                if lost.count >= TRIES:
                    raise
                log.warning("member %s failed, its %d requests go on: %s", name, len(again), error)
                if not self._loads(refused | lost.names()):
                    if until is None or time.monotonic() - begun_at > self._fleet.lease:
                        until = self._patience  # it served meanwhile: this is another outage
                    if not await self._somebody(until, lost, call, again):
                        raise
                    refused.clear()
                call.forget(self._fleet.epoch, self._fleet.version, self._fleet.parted)
                begun = [row for row in again if row in call.begun]
                for part in (begun, [row for row in again if row not in call.begun]):
                    todo += self._shares(call, part, refused | lost.names()).items()

    @property
    def _patience(self) -> float:
        """Until when a call waits for a member that serves: a busy host, on which all leases have
        run out at a time, is no reason to end what runs.
        """
        return time.monotonic() + PATIENCE * self._fleet.lease

    async def _somebody(
        self, until: float, lost: Lost, call: FleetCall, rows: Collection[int]
    ) -> bool:
        """Whether a member serves that is not lost, after a while and before ``until``; or none is
        needed, as all of these ``rows`` are aborted.
        """
        while time.monotonic() < until and not self._fleet.closed and not self._hold.wanted.asleep:
            if call.is_aborted(rows):
                break
            await asyncio.sleep(self._fleet.lease / 16)
            if self._loads(lost.names()):
                return True
        return call.is_aborted(rows)

    async def _met(self, name: str) -> Link:
        link = next((one for one in self._fleet.serving() if one.name == name), None)
        if link is None:
            raise EngineClosed(f"member {name} does not serve any more")
        if not link.met:
            await link.client.start()
            link.met = True
        await self._hold.reach(link)
        return link

    def _loads(self, without: set[str]) -> dict[str, float]:
        standings = self._fleet.standings()
        return {
            link.name: load_of(link.calls + link.others, standings[link.name])
            for link in self._fleet.serving()
            if link.name in standings and link.name not in without
        }


class _Running:
    """A call under way. Within the block its task waits for what comes next, or for the call's end
    by others, which is raised; but for where it ``leaves_off`` until it ``goes_on``.
    """

    def __init__(self, call: FleetCall) -> None:
        self.call = call
        self._waits: asyncio.Task[Any] | None = None
        self._cancelled = 0  # how often by others, before
        self._error: EngineError | None = None

    def end(self, error: EngineError) -> None:
        if self._error is not None:
            return  # it is on its way out
        self._error = error
        if self._waits is not None:
            self._waits.cancel()

    def goes_on(self) -> None:
        if self._error is not None:
            raise self._error
        if (task := asyncio.current_task()) is not None:
            self._waits, self._cancelled = task, task.cancelling()

    def leaves_off(self) -> None:
        self._leave(None)

    def __enter__(self) -> None:
        self.goes_on()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leave(kind)

    def _leave(self, kind: type[BaseException] | None) -> None:
        task, self._waits = self._waits, None
        if self._error is None or task is None or task.cancelling() <= self._cancelled:
            return
        if task.uncancel() <= self._cancelled and (
            kind is None or issubclass(kind, asyncio.CancelledError)
        ):
            raise self._error


async def _merged(shares: Sequence[Outputs]) -> Outputs:
    """The outputs of all as they come; of those that nobody has read yet the newest of each row."""
    queue: asyncio.Queue[Any] = asyncio.Queue()  # rows; None or an error where a share ends
    newest: dict[int, RequestOutput] = {}

    async def one(share: Outputs) -> None:
        try:
            async with contextlib.aclosing(share) as outputs:
                async for row, output in outputs:
                    if row not in newest:
                        queue.put_nowait(row)
                    newest[row] = output
        except asyncio.CancelledError:  # by us, or as its connection was closed
            queue.put_nowait(EngineClosed("the connection was closed while the call ran"))
            raise
        except Exception as error:  # noqa: BLE001 - raised where the outputs are read
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(one(share)) for share in shares]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield item, newest.pop(item)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _has_refused(error: Exception) -> bool:
    """Whether it is a member's own word, that it may not: then no prompt has ended its process."""
    cause = error.__cause__
    said = cause is None or (isinstance(cause, grpc.RpcError) and is_typed(cause))
    return isinstance(error, EngineClosed) and said


@contextlib.asynccontextmanager
async def _calling(link: Link, call: FleetCall, rows: Sequence[int]) -> AsyncIterator[None]:
    """The member has these rows within the block."""
    link.calls += len(rows)
    call.placed.update(rows)
    try:
        yield
    finally:
        link.calls -= len(rows)
        call.placed.difference_update(rows)
