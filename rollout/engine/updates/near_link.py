"""The way to the weights of an engine in this process."""

from __future__ import annotations

from dataclasses import replace

from rollout.distributed import LOOPBACK
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.lease import Lease
from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import UpdateRequest, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports import nearest_first


class NearLink:
    """The way to the weights within one process: bytes go with the calls, no group has to form."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def info(self) -> WeightInfo:
        info = self._coordinator.info()
        return replace(info, transports=nearest_first(info.transports))

    local_address = LOOPBACK  # the ranks are children of this process
    joins = False

    def digests(self, timeout: float) -> dict[str, int]:
        return self._coordinator.digests(timeout)

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        return self._coordinator.receipts

    def open(self) -> WeightChannel:
        return Lease(self._coordinator)

    def join(self, request: UpdateRequest, secret: str, lane: int) -> WeightChannel:
        raise TransferFailed("an engine in this process has one channel alone")
