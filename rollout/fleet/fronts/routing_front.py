"""A front that routes only: another one coordinates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from torch import Tensor

from rollout.errors import ConfigError, EngineError
from rollout.fleet.calls.hold import Holding
from rollout.fleet.calls.taken import answer_of
from rollout.fleet.coordination.held import Held
from rollout.fleet.fronts.front import Front
from rollout.fleet.fronts.routed_fleet import RoutedFleet
from rollout.fleet.link import Link
from rollout.generation.metrics import EngineCounters, EngineStats
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.membership import AskRoutes, Routes
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Seal,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt


class RoutingFront(Front):
    """Calls go to members from here; whatever changes the fleet goes to the coordinating front."""

    fleet: RoutedFleet

    def __init__(
        self,
        fleet: RoutedFleet,
        *,
        start_timeout: float = 600.0,
        weight_dirs: Sequence[str] = (),
    ) -> None:
        super().__init__(fleet, ToldHold(fleet), weight_dirs)
        self._timeout = start_timeout
        self._client = fleet.coordinator
        self._counters = EngineCounters()

    async def start(self) -> None:
        """Until the coordinating front has told of a member that serves; ``DeadlineExceeded`` after
        ``start_timeout`` seconds, ``ConfigError`` where it is none.
        """
        async with self._starting:
            if self._started is not None:
                return
            await asyncio.to_thread(self.fleet.wait_serving, self._timeout)
            await self._meet_members()
            self._started = await self._any(self._asked)

    async def disconnect(self) -> None:
        await self._client.disconnect()
        await super().disconnect()

    async def stats(self) -> EngineStats:
        """Of the fleet, its updates among it; of the members alone where nobody coordinates."""
        with suppress(EngineError):
            fleet = self.fleet
            for stats in await answer_of(self._client.stats(), fleet.is_silent, fleet.lease):
                return replace(stats, state=await self.state(), paused=self.hold.wanted.paused)
        return await super().stats()

    async def routes(self, ask: AskRoutes) -> Routes:
        raise ConfigError(
            f"this front routes only: name the one that coordinates, {self._client.address}"
        )

    # ---- weights (blocking) ----

    @property
    def counters(self) -> EngineCounters:
        return self._counters

    verbs = replicas = None

    def info(self) -> WeightInfo:
        return self._client.info()

    def open(self) -> WeightChannel:
        return PassedOnChannel(self._client.open(), self.fleet)

    def rollback(self, timeout: float) -> UpdateReceipt:
        try:
            return self._client.rollback(timeout)
        finally:
            self.fleet.refresh()

    def digests(self, timeout: float) -> dict[str, int]:
        return self._client.digests(timeout)

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        return self._client.receipts()


class ToldHold(Holding):
    """What the coordinating front holds members in, which brings them to it; verbs go there."""

    def __init__(self, fleet: RoutedFleet) -> None:
        self.wanted = Held()
        self._fleet, self._client = fleet, fleet.coordinator
        fleet.watch(lambda held: setattr(self, "wanted", held))

    async def reach(self, link: Link) -> None:
        """It is told to serve once it is held as all are."""

    async def pause(self, mode: str, timeout: float) -> None:
        await self._do(lambda client: client.pause(mode, timeout))

    async def resume(self) -> None:
        await self._do(lambda client: client.resume())

    async def sleep(self, level: int, mode: str, timeout: float) -> None:
        await self._do(lambda client: client.sleep(level, mode, timeout))

    async def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        await self._do(lambda client: client.wake_up(tags, timeout))

    async def reset_prefix_cache(self, reset_running_requests: bool) -> None:
        await self._client.reset_prefix_cache(reset_running_requests)

    async def _do(self, verb: Callable[[RolloutClient], Awaitable[None]]) -> None:
        try:
            await verb(self._client)
        finally:
            await asyncio.to_thread(self._fleet.refresh)


class PassedOnChannel:
    """``WeightChannel``: an update through a front that routes only, to the one that coordinates.

    Bytes that come with the calls go on as they come; shared memory is read there.
    """

    reads_in_place = False
    secret = ""

    def __init__(self, channel: WeightChannel, fleet: RoutedFleet) -> None:
        self._channel, self._fleet = channel, fleet
        self._lock = threading.Lock()  # of the streams here: the one that goes on answers in order

    def begin(self, request: UpdateRequest) -> Begun:
        if "senders" in request.offer:  # all of them have their streams here, and one goes on
            request = replace(request, offer={**request.offer, "senders": 1})
        return self._channel.begin(request)

    def buffer(self, nbytes: int) -> Tensor | None:
        return None

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        with self._lock:
            self._channel.bucket(header, payload)

    def wait(self, index: int, timeout: float) -> None:
        with self._lock:
            self._channel.wait(index, timeout)

    def seal(self, seal: Seal) -> None:
        self._channel.seal(seal)

    def commit(self) -> UpdateReceipt:
        try:
            return self._channel.commit()
        finally:
            self._fleet.refresh()  # who asks here which version is live is told this one

    def abort(self, reason: str) -> None:
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()
