"""Boxes that the trainer's ranks exchange on their GPUs, and each of the engine's maps from one.

For shards on the engine's GPUs that not every one of its ranks can map where they lie: each sees
one GPU alone (``CUDA_VISIBLE_DEVICES``, as Ray sets it), or torch's ``expandable_segments`` made
the memory. Each engine rank has a *relay*: the trainer rank on its own GPU, or one on a GPU that
all of them reach. The trainer's ranks bring each relay what its engine ranks want
(``trainer/resharded_boxes.py``), in memory that it lends (``lent_memory``), where these read it. No
byte goes through host memory.

The ``regions`` of a round's header are handles: of the memory that each engine rank is to map.
"""

from __future__ import annotations

import secrets
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import BucketHeader, UpdateRequest, WeightInfo
from rollout.weight_sync.transports import cuda_ipc
from rollout.weight_sync.transports.base import (
    Accepted,
    EngineRank,
    Holding,
    Opening,
    Receiver,
    Sender,
    Transport,
    offer_of,
)
from rollout.weight_sync.transports.cuda_memory import FLAGS, device_of, read_handle, whole_pages
from rollout.weight_sync.transports.lent_memory import MappedLent
from rollout.weight_sync.transports.shared_memory import half_of
from rollout.wire.codec import Text, to_plain


@dataclass(frozen=True, slots=True, kw_only=True)
class ReshardOffer:
    """``secret``: what the handles of this update are marked with. ``known``: digest of the
    engine's requested boxes that the sender remembers.
    """

    secret: Text
    known: Text


def relays(info: WeightInfo, holding: Holding) -> tuple[int, ...] | None:
    """By engine rank, the trainer rank whose memory it maps; None where one has none to map."""
    near = [
        gpu if host and host == info.host else ""
        for gpu, host in zip(holding.rank_gpus, holding.hosts, strict=True)
    ]
    serves: Counter[int] = Counter()
    found = []
    for own in info.devices:
        there = [rank for rank, gpu in enumerate(near) if gpu and gpu == own]
        reached = [rank for rank, gpu in enumerate(near) if gpu and gpu in info.reaches]
        if not (there or reached):
            return None
        relay = min(there or reached, key=lambda rank: serves[rank])
        serves[relay] += 1
        found.append(relay)
    return tuple(found) or None


class Reshard(Transport):
    name = "reshard"
    senders = "all"
    exchanged = True

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        if holding is None or holding.problem is not None or holding.not_mapped is None:
            return None  # where all are mapped, they need not even be exchanged
        if not holding.split and cuda_ipc.why_not(info) is None:
            return None  # what the first rank holds is enough, and mapped
        why = f"; not mapped: {holding.not_mapped}" if holding.not_mapped else ""
        return f"trainer ranks on the engine's GPUs bring each of its ranks what it wants{why}"

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        if holding is None:
            return "not looked into"
        if holding.problem is not None:
            return holding.problem
        if info.hosts:
            return "members of a fleet map what one trainer rank lends"
        if holding.not_exchanged:
            return holding.not_exchanged
        if relays(info, holding) is None:
            return "a rank of the engine has no trainer rank on its GPU, nor on one that all reach"
        return None

    def open(self, opening: Opening) -> Sender:
        return ReshardSender(opening.known)

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        return Accepted(known=offer_of(ReshardOffer, request).known)

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        offer = offer_of(ReshardOffer, request)
        device = torch.device(at.device)
        return ReshardReceiver(offer.secret, at.rank, request.bucket_bytes, device)


class ReshardSender(Sender):
    """What the first trainer rank says to the engine; every rank lends memory of its own."""

    bytes_go = "memory"

    def __init__(self, known: str) -> None:
        self.offer = to_plain(ReshardOffer(secret=secrets.token_hex(16), known=known))

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        channel.wait(0, timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        channel.bucket(header, None)  # where its bytes are, says the header


class ReshardReceiver:
    """Maps the memory of its relay after checking what it is, and reads each round there."""

    def __init__(self, secret: str, rank: int, bucket_bytes: int, device: torch.device) -> None:
        self._secret, self._rank, self._device = secret, rank, device
        self._most = FLAGS + 2 * whole_pages(bucket_bytes)
        self._handle = ""
        self._memory: Tensor | None = None
        self._reads: Any = None  # the stream on which this rank reads: the staging thread's
        self._closed = False

    def connect(self, timeout: float) -> None:
        self._reads = torch.cuda.current_stream(self._device)

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        if self._rank >= min(len(header.regions), FLAGS):
            raise self._refused(f"the round tells of {len(header.regions)} ranks")
        text = header.regions[self._rank]
        if text != self._handle and not self._closed:
            self._map(text, header.regions[: self._rank].count(text))
        size = 0 if self._memory is None else self._memory.numel()
        return half_of(self._memory, FLAGS, (size - FLAGS) // 2, header, self._rank)

    def _map(self, text: str, flag: int) -> None:
        """``flag``: how many ranks before this one map the same memory."""
        if self._handle:
            raise self._refused("it is another than in the rounds before")
        try:
            uuid, size, handle = read_handle(text, self._secret)
        except ValueError as error:
            raise self._refused(str(error)) from error
        if (size - FLAGS) % (2 * FLAGS) or not FLAGS < size <= self._most:
            raise self._refused(f"{size} bytes were not agreed on")
        owner = device_of(uuid)
        if owner is None:
            raise self._refused(f"this rank does not see the GPU {uuid}")
        self._memory = MappedLent(self._secret, owner, self._reads, flag).map(size, handle)
        self._handle = text

    def close(self) -> None:
        self._memory, self._closed = None, True  # unmapped when the last view is gone

    def _refused(self, why: str) -> TransferFailed:
        return TransferFailed(f"rank {self._rank}: the relay's GPU memory is refused: {why}")
