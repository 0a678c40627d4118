"""A fleet in the place of an engine: what the servers and ``AsyncRollout`` are put over."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from rollout.engine.updates.verbs.session import VerbSession
from rollout.fleet.calls.hold import Hold
from rollout.fleet.fleet import Fleet
from rollout.fleet.fronts.front import Front
from rollout.fleet.fronts.gathering import gather, missing
from rollout.fleet.fronts.route_teller import RouteTeller
from rollout.fleet.launching.replicas import Replicas
from rollout.fleet.updates.broadcast_update import FleetTarget
from rollout.fleet.updates.channel import FleetChannel
from rollout.fleet.updates.committed import CommittedUpdates
from rollout.fleet.updates.rollback import roll_back
from rollout.fleet.updates.update_log import KEPT_RECEIPTS, UpdateLog
from rollout.generation.metrics import EngineCounters, EngineStats
from rollout.weight_sync.protocol.membership import AskRoutes, Routes
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports.host import host_id


class FleetBackend(Front):
    """The front that coordinates: it grants leases, and commits."""

    fleet: Fleet
    hold: Hold

    def __init__(
        self,
        fleet: Fleet,
        *,
        start_timeout: float = 600.0,
        weight_dirs: Sequence[str] = (),
        replicas: Replicas | None = None,
    ) -> None:
        """``weight_dirs``: see ``Front``. ``replicas``: members that it starts, and has run from
        then on; see ``start``.
        """
        hold = Hold(fleet, fleet.record)
        super().__init__(fleet, hold, weight_dirs)
        self._replicas = replicas
        self._timeout, self._launched = start_timeout, False
        self._log = UpdateLog()
        self._updates = CommittedUpdates(KEPT_RECEIPTS)
        self._target = FleetTarget(self, self._updates)
        self._verbs = VerbSession(self._target)
        self._teller = RouteTeller(fleet, hold)

    async def start(self) -> None:
        """Until as many members serve as a commit needs; ``DeadlineExceeded`` after
        ``start_timeout`` seconds. Others join when they can.
        """
        async with self._starting:
            if self._started is not None:
                return
            if self._replicas is not None and not self._launched:
                self._launched = True
                await asyncio.to_thread(self._replicas.start)
            await asyncio.to_thread(gather, self.fleet, self._timeout)
            await self._meet_members()
            await self.hold.find()
            self._teller.begins = True
            await asyncio.to_thread(self.fleet.serve)
            self._started = await self._any(self._asked)

    @property
    def waits_for(self) -> str:
        return missing(self.fleet)

    def _others_route(self) -> bool:
        return self._teller.is_asked

    async def disconnect(self) -> None:
        self._teller.close()
        await super().disconnect()

    def close(self) -> None:
        self._verbs.close()
        self._target.places.close()
        super().close()

    async def stats(self) -> EngineStats:
        lost = self.fleet.members_lost
        return replace(await super().stats(), **self._log.figures(), fleet_members_lost_total=lost)

    async def routes(self, ask: AskRoutes) -> Routes:
        return await self._teller.answer(ask)

    # ---- weights (blocking) ----

    @property
    def counters(self) -> EngineCounters:
        return self._log.counters

    @property
    def verbs(self) -> VerbSession:
        return self._verbs

    @property
    def replicas(self) -> Replicas | None:
        return self._replicas

    def info(self) -> WeightInfo:
        fleet = self.fleet
        info = fleet.ask_any(lambda client: client.info())
        if info.device.startswith("cuda"):
            info = self._with_cards(info)
        return replace(
            info, epoch=fleet.epoch, version=fleet.version, state=fleet.update_state, prepared="",
            fence=fleet.promise.fence, transports=self._transports(info.device), host=host_id(),
            adapters=self.adapters,
            adapter_digests={one.name: one.digest for one in fleet.promise.adapters},
            last_update_id=fleet.promise.update_id, incomplete=self._verbs.lacks,
        )  # fmt: skip

    def open(self, kind: Callable[..., FleetChannel] = FleetChannel) -> FleetChannel:
        info = self.fleet.ask_any(lambda client: client.info())
        names = frozenset(meta.name for meta in info.tensors)
        transports = self._transports(info.device)
        return kind(self.fleet, transports, self._log, names, self._updates)

    def rollback(self, timeout: float) -> UpdateReceipt:
        return roll_back(self.fleet, self._log, timeout)

    def digests(self, timeout: float) -> dict[str, int]:
        return self.fleet.ask_any(lambda client: client.digests(timeout))

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        return self._log.receipts

    # ---- helpers ----

    def _transports(self, device: str) -> tuple[str, ...]:
        """Bytes with the calls go on to members; shared memory is mapped by those of this host, and
        read by the front for the others; GPUs' memory by those that reach it. ``device``: of a
        member.
        """
        here, serving = host_id(), self.fleet.serving()
        if device.startswith("cuda"):
            near = any(link.reaches for link in serving)
        else:
            near = here != "" and any(link.place == here for link in serving)
        return ("ipc", "inline") if near else ("inline",)

    def _with_cards(self, info: WeightInfo) -> WeightInfo:
        """What trainers are told of the GPUs: all ranks that may map their memory, and where."""
        links = [link for link in self.fleet.links() if link.reaches]
        if not links:
            return info
        return replace(
            info, devices=tuple(uuid for link in links for uuid in link.devices),
            reaches=tuple(sorted({uuid for link in links for uuid in link.reaches})),
            hosts=tuple(sorted({link.host for link in links})),
            features=tuple(dict.fromkeys((*info.features, "cards"))),
        )  # fmt: skip
