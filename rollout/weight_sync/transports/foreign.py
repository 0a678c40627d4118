"""Broadcasts of a framework's own trainer, as vLLM's weight transfer has them.

The trainer leads the group: it is rank 0 and listens as a ``TCPStore``; engine rank r comes as
``rank_offset + r``. Unlike other transports' groups this one outlives an update, and what runs at
the other end is not ours: payloads come bare, one tensor or one pack of tensors each, without a
preamble or a digest. Only what was announced on the channel says what they hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.messages import BucketHeader, UpdateRequest
from rollout.weight_sync.transports.base import (
    Accepted,
    EngineRank,
    Receiver,
    Transport,
)
from rollout.weight_sync.transports.foreign_group import ForeignGroup, Member


class ForeignTransfer(Transport):
    """The verbs alone choose it: it has no sender of ours."""

    name = "foreign"
    offered = False

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        if request.offer:
            raise ConfigError("transport 'foreign' has no offer")
        return Accepted(bounded=False)  # the engine itself cuts what was announced

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        return ForeignReceiver(at.member, at.rank)


def make_member(wire: Mapping[str, Any], rank: int, device: str) -> Member:
    """A place for engine rank ``rank``: gloo on a CPU, NCCL on its CUDA device."""
    group = ForeignGroup(**wire)
    if device.split(":")[0] == "cpu":
        from rollout.weight_sync.transports.foreign_gloo import GlooMember

        return GlooMember(group, group.rank_offset + rank)
    if group.name:
        from rollout.weight_sync.transports.torch_nccl import TorchNcclMember

        return TorchNcclMember(group, group.rank_offset + rank, device)
    from rollout.weight_sync.transports.vllm_nccl import NcclMember

    return NcclMember(group, group.rank_offset + rank, device)


class ForeignReceiver:
    """A rank's end during one update, over places it has already.

    ``place``: the one that the next broadcast comes over.
    """

    def __init__(self, place: Callable[[], Member | None], rank: int) -> None:
        self._place, self._rank = place, rank
        self._receiving: Member | None = None
        self._closed = False

    def connect(self, timeout: float) -> None:
        """Nothing: which group the first broadcast comes over is said with it."""

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        self._receiving = member = self._member()
        try:
            if self._closed:
                raise TransferFailed(f"rank {self._rank}: the update was aborted")
            payload = member.receive(sum(e.nbytes for e in header.entries), timeout)
        finally:
            self._receiving = None
        return _aligned(header, payload)

    def close(self) -> None:
        """The group stays, unless a broadcast is being waited for: nobody knows what comes next."""
        self._closed = True
        member = self._receiving
        if member is not None:
            member.close()

    def _member(self) -> Member:
        member = self._place()
        if member is None:
            raise TransferFailed(
                f"rank {self._rank} is in no transfer group: init_weight_transfer_engine first"
            )
        return member


def _aligned(header: BucketHeader, payload: Tensor) -> Tensor:
    """``payload``, whose tensors follow each other without gaps, laid out as ``header`` says."""
    starts, end = [], 0
    for entry in header.entries:
        starts.append(end)
        end += entry.nbytes
    if all(e.offset == start for e, start in zip(header.entries, starts, strict=True)):
        return payload
    spread = torch.empty(header.nbytes, dtype=torch.uint8, device=payload.device)
    for entry, start in zip(header.entries, starts, strict=True):
        spread[entry.offset : entry.offset + entry.nbytes] = payload[start : start + entry.nbytes]
    return spread
