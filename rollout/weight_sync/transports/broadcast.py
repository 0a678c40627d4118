"""Every bucket to every engine rank, over connections formed between independently started jobs.

Group rank 0 is the trainer's sender, rank r + 1 is engine rank r. Sockets of ours carry the bytes
(``links``), or NCCL where both sides have GPUs of their own (``nccl_group``). They live as long as
one update, so a failed one leaves nothing half open behind.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rollout.distributed import Rendezvous, RendezvousServer
from rollout.weight_sync.protocol.bucket import check_size
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import BucketHeader, UpdateRequest
from rollout.weight_sync.transports.base import (
    Accepted,
    EngineRank,
    Opening,
    Receiver,
    Sender,
    Transport,
    offer_of,
)
from rollout.weight_sync.transports.cuda_memory import gpu_uuid
from rollout.weight_sync.transports.group import GroupOffer, check_group, explained
from rollout.weight_sync.transports.links import Links
from rollout.weight_sync.transports.nccl_group import NcclGroup
from rollout.wire.codec import to_plain


class Broadcast(Transport):
    name = "broadcast"
    fallback = True

    def open(self, opening: Opening) -> Sender:
        return BroadcastSender(opening)

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        check_group(offer_of(GroupOffer, request).rendezvous, 1, num_ranks, device)
        return Accepted()

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        where = offer_of(GroupOffer, request).rendezvous
        return BroadcastReceiver(where, at.rank, at.device, request.bucket_bytes)


class BroadcastSender(Sender):
    """Listens for the engine's ranks and sends each bucket to all of them."""

    def __init__(self, opening: Opening) -> None:
        info = opening.info
        backend = choose_backend(info.device, torch.cuda.is_available(), shares_gpu(info.devices))
        self._server = RendezvousServer(info.num_ranks + 1, backend, opening.host)
        self._carrier = _carrier(self._server.info, 0)
        self.offer = to_plain(GroupOffer(self._server.info))
        self.device = "cuda" if backend == "nccl" else "cpu"

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        with explained(channel):
            self._carrier.connect(timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        channel.bucket(header, None)
        with explained(channel, header.index):
            self._carrier.send(header.index, payload)

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        # The channel knows of a rank's error first; the link would only time out.
        channel.wait(index, timeout)
        with explained(channel, index):
            self._carrier.wait(index, timeout)

    def close(self) -> None:
        self._carrier.close()
        self._server.close()


class BroadcastReceiver:
    """Joins as group rank ``rank + 1`` and receives into two alternating buffers."""

    def __init__(self, where: Rendezvous, rank: int, device: str, bucket_bytes: int) -> None:
        self._limit = bucket_bytes
        self._device = device if where.backend == "nccl" else "cpu"
        self._carrier = _carrier(where, rank + 1)
        self._buffers: list[Tensor | None] = [None, None]

    def connect(self, timeout: float) -> None:
        self._carrier.connect(timeout)

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        check_size(header, self._limit)
        into = self._buffer(header)
        self._carrier.receive(header.index, into, timeout)
        return into

    def _buffer(self, header: BucketHeader) -> Tensor:
        which = header.index % 2
        held = self._buffers[which]
        if held is None or held.numel() < header.nbytes:
            held = torch.empty(header.nbytes, dtype=torch.uint8, device=self._device)
            self._buffers[which] = held
        return held[: header.nbytes]

    def close(self) -> None:
        self._carrier.close()


class _Carrier(Protocol):
    def connect(self, timeout: float) -> None: ...
    def send(self, index: int, payload: Tensor) -> None: ...
    def wait(self, index: int, timeout: float) -> None: ...
    def receive(self, index: int, into: Tensor, timeout: float) -> None: ...
    def close(self) -> None: ...


class _Sockets:
    """The sender's link to each engine rank, or a rank's to the sender."""

    def __init__(self, where: Rendezvous, rank: int) -> None:
        self._links, self._receivers = Links(where, rank, 1), range(1, where.size)
        self.connect, self.wait, self.close = (
            self._links.connect,
            self._links.wait,
            self._links.close,
        )

    def send(self, index: int, payload: Tensor) -> None:
        for peer in self._receivers:
            self._links.post(index, peer, payload)

    def receive(self, index: int, into: Tensor, timeout: float) -> None:
        self._links.receive(index, 0, into, timeout)


def _carrier(where: Rendezvous, rank: int) -> _Carrier:
    return NcclGroup(where, rank) if where.backend == "nccl" else _Sockets(where, rank)


def choose_backend(device: str, cuda_here: bool, shared: bool = False) -> str:
    """NCCL where the engine's ranks (``cuda:0`` ...) and this process have devices, else sockets.

    NCCL refuses a group two of whose members ``shared`` one GPU.
    """
    return "nccl" if device.split(":")[0] == "cuda" and cuda_here and not shared else "tcp"


def shares_gpu(devices: tuple[str, ...]) -> bool:
    """Whether this process's current GPU is among the ranks' UUIDs."""
    if not torch.cuda.is_available():
        return False
    return gpu_uuid(torch.device("cuda", torch.cuda.current_device())) in filter(None, devices)
