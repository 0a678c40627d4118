"""A front's own places in groups of trainers that broadcast, in the stead of its members' ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from rollout.errors import ConfigError, RolloutError, TransferFailed
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.transports.foreign import make_member
from rollout.weight_sync.transports.foreign_group import ForeignGroup, Member

T = TypeVar("T")


class FrontPlaces:
    """As many in each group as one member has ranks, which is what trainers are told.

    ``info``: of the fleet. What is broadcast comes to each of them; the first one's is used. On a
    CPU over gloo; where members are on GPUs trainers broadcast over NCCL, and the front needs a GPU
    for each place.
    """

    def __init__(self, info: Callable[[], WeightInfo]) -> None:
        self._info = info
        self._members: dict[str, list[Member]] = {}
        self._used = self._receiving = ""

    @property
    def count(self) -> int:
        return self._info().num_ranks

    def join(self, place: str, group: ForeignGroup, timeout: float) -> None:
        info = self._info()
        count, kind = info.num_ranks, info.device.split(":")[0]
        if kind == "cuda" and torch.cuda.device_count() < count:
            raise ConfigError(
                f"this trainer broadcasts over NCCL, and the fleet's front takes {count} places in "
                f"its group: it needs as many GPUs, and has {torch.cuda.device_count()}. Start it "
                "where it has, or send the fleet its weights with update_weights(model), from a "
                "directory (server_path=), or as safetensors"
            )
        members = [
            make_member(group.to_wire(), n, f"cuda:{n}" if kind == "cuda" else "cpu")
            for n in range(count)
        ]
        self._members[place] = members
        _each(members, lambda member: member.join(timeout))

    def use(self, place: str) -> None:
        self._used = place

    def receive(self, nbytes: int, timeout: float, check: Callable[[], None]) -> Tensor:
        """The next broadcast, uint8 [nbytes], valid until the next call. ``check`` raises where it
        is not wanted any more; from then on ``interrupt`` ends it.
        """
        place = self._receiving = self._used
        try:
            check()
            if not (members := self._members.get(place)):
                raise TransferFailed("the front has left the trainer's group")
            return _each(members, lambda member: member.receive(nbytes, timeout))[0]
        finally:
            self._receiving = ""

    def drop(self, nbytes: int, timeout: float) -> None:
        self.receive(nbytes, timeout, lambda: None)

    def interrupt(self) -> None:
        """End a broadcast that is waited for, with its places: nobody knows what comes next."""
        for member in self._members.get(self._receiving, []):
            member.close()

    def are_alive(self, place: str, timeout: float) -> bool:
        members = self._members.get(place, [])
        try:
            return bool(members) and all(_each(members, lambda member: member.is_alive()))
        except RolloutError:
            return False

    def close(self) -> None:
        """Leave all groups: their members' processes end with this."""
        for place in list(self._members):
            self.leave(place)

    def leave(self, place: str) -> None:
        for member in self._members.pop(place, []):
            member.close()


def _each(members: list[Member], fn: Callable[[Member], T]) -> list[T]:
    """``fn`` of all at once; each ends by its own deadline."""
    if len(members) == 1:
        return [fn(members[0])]
    with ThreadPoolExecutor(len(members), "rollout-fleet-place") as pool:
        return list(pool.map(fn, members))
