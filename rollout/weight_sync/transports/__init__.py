"""How the bytes of a bucket get from the sender to every rank. A transport never knows a model.

The sender announces a bucket on the channel, which reaches all ranks in one order, then moves its
bytes; a rank posts its receive when it sees the announcement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rollout.distributed import LOOPBACK, Rendezvous
from rollout.errors import ConfigError
from rollout.weight_sync.protocol.messages import (
    BucketHeader,
    SharedBuckets,
    UpdateRequest,
    WeightChannel,
    WeightInfo,
)
from rollout.weight_sync.transports.cuda_ipc import why_not as why_no_cuda_ipc
from rollout.weight_sync.transports.host import host_id

TRANSPORTS = ("inline", "grpc_stream", "broadcast", "ipc", "p2p")


class Sender(Protocol):
    """The trainer's end of a road; used by one thread, closed by whoever made it."""

    name: str

    def buffers(self, bucket_bytes: int) -> tuple[Tensor, ...]:
        """Equal uint8 buffers that buckets have to be packed into; () leaves it to the packer.

        Called before ``rendezvous`` and ``shared``; ``bucket_bytes`` is what was agreed on.
        """
        ...

    def rendezvous(self) -> Rendezvous | None:
        """Where the ranks will meet this sender; None when the road needs no group."""
        ...

    def shared(self) -> SharedBuckets | None:
        """The shared memory that the ranks will map; None when the road needs none."""
        ...

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        """Meet the engine's ranks; called once, after the engine has accepted the update."""
        ...

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        """Announce a bucket and start moving it; ``payload`` stays untouched until ``wait``."""
        ...

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        """Until every rank has taken bucket ``index``, so that its buffer is free again."""
        ...

    def close(self) -> None:
        """Drop the road at once; peers blocked on it see an error. Idempotent."""
        ...


class Receiver(Protocol):
    """A rank's end of a road; used by the rank's staging thread only."""

    def connect(self, timeout: float) -> None: ...

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        """The payload of the announced bucket, uint8 [nbytes], valid until the next call."""
        ...

    def close(self) -> None: ...


class SpreadSender(Sender, Protocol):
    """The end of a road on which every trainer rank sends, here the first one's."""

    def spread(self, ranks: int) -> None:
        """How many trainer ranks will send; called before ``rendezvous``."""
        ...

    @property
    def sent_bytes(self) -> int:
        """What has left this rank so far."""
        ...


SenderFactory = Callable[[WeightInfo, float, str], Sender]


@dataclass(frozen=True, slots=True)
class Road:
    """One way to try, and why it is this one's turn."""

    transport: str | SenderFactory
    reason: str


def is_spread(transport: str | SenderFactory) -> bool:
    """Whether every trainer rank sends on this road."""
    return transport == "p2p" or bool(getattr(transport, "is_spread", False))


def roads(
    transport: str | SenderFactory, info: WeightInfo, no_p2p: str | None = "", split: bool = False
) -> tuple[Road, ...]:
    """The ways that "auto" tries one after the other; one alone where the caller has chosen.

    The engine's order, but shared memory first where both sides have it, unless the only rank is
    in this process: then nothing is faster than handing it the bytes. ``no_p2p``: why trainer
    ranks cannot send their own boxes, None when they can, "" where that was not looked into. They
    do where the weights are ``split`` among them, and so no gather is needed.
    """
    if is_spread(transport) and no_p2p is not None:
        return tuple(
            Road(r.transport, f"no p2p: {no_p2p or 'not looked into'}; {r.reason}")
            for r in roads("auto", info)
        )
    if transport != "auto":
        return (Road(transport, "asked for"),)
    if no_p2p is None and split:
        return (
            Road("p2p", "the weights are split among trainer ranks, and need no gather"),
            *(Road(r.transport, f"p2p failed; {r.reason}") for r in roads("auto", info)),
        )
    in_process = info.transports[:1] == ("inline",)
    if in_process and info.tensor_parallel_size == 1:
        return (Road("inline", "the engine is in this process"),)
    others = [name for name in info.transports if name not in ("ipc", "p2p")]
    why = _why_not_ipc(info)
    if why is None:
        found = [Road("ipc", "same host, and its /dev/shm is this one")]
        return (*found, *(Road(name, "ipc failed") for name in others))
    return tuple(Road(name, f"no ipc: {why}") for name in others)


def _why_not_ipc(info: WeightInfo) -> str | None:
    if "ipc" not in info.transports:
        return "the engine does not offer it"
    if info.device.split(":")[0] == "cuda":
        return why_no_cuda_ipc(info)
    if info.device.split(":")[0] != "cpu":
        return f"the engine is on {info.device}"
    if not same_host(info):
        return "the engine is on another host"
    return None


def same_host(info: WeightInfo) -> bool:
    """Whether this process shares memory with the engine that announced ``info``."""
    return info.host != "" and info.host == host_id()


def make_sender(
    transport: str | SenderFactory, info: WeightInfo, timeout: float, host: str = LOOPBACK
) -> Sender:
    """The sender for ``transport``: a name of ``TRANSPORTS``, "auto", or a factory of one.

    "auto" takes the first of ``roads``. ``host``: the address of this machine as the engine
    reaches it, for roads that listen here.
    """
    if callable(transport):
        return transport(info, timeout, host)
    name = transport
    if transport == "auto":
        return make_sender(roads(transport, info)[0].transport, info, timeout, host)
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; known: auto, {', '.join(TRANSPORTS)}")
    if name == "inline":
        from rollout.weight_sync.transports.inline import InlineSender

        return InlineSender()
    if name == "grpc_stream":
        from rollout.weight_sync.transports.inline import GrpcStream

        return GrpcStream()(info, timeout, host)
    if name == "ipc" and info.device.split(":")[0] == "cuda":
        from rollout.weight_sync.transports.cuda_ipc import CudaIpcSender

        return CudaIpcSender(info, timeout)
    if name == "ipc":
        from rollout.weight_sync.transports.shared_memory import IpcSender

        return IpcSender(info, timeout)
    if name == "p2p":
        from rollout.weight_sync.transports.p2p import P2PSender

        return P2PSender(info, timeout, host)
    from rollout.weight_sync.transports.broadcast import BroadcastSender

    return BroadcastSender(info, timeout, host)


def make_receiver(request: UpdateRequest, rank: int, device: str) -> Receiver:
    """The receiver that matches an accepted update request, for engine rank ``rank``."""
    if request.transport in ("inline", "grpc_stream"):
        from rollout.weight_sync.transports.inline import InlineReceiver

        return InlineReceiver()
    if request.transport == "broadcast" and request.rendezvous is not None:
        from rollout.weight_sync.transports.broadcast import BroadcastReceiver

        return BroadcastReceiver(request.rendezvous, rank, device, request.bucket_bytes)
    if request.transport == "ipc" and request.shared is not None and request.shared.handle:
        from rollout.weight_sync.transports.cuda_ipc import CudaIpcReceiver

        return CudaIpcReceiver(request.shared, rank, request.bucket_bytes, torch.device(device))
    if request.transport == "ipc" and request.shared is not None:
        from rollout.weight_sync.transports.shared_memory import IpcReceiver

        return IpcReceiver(request.shared, rank, request.bucket_bytes)
    if request.transport == "p2p" and request.rendezvous is not None:
        from rollout.weight_sync.transports.p2p import P2PReceiver

        return P2PReceiver(request.rendezvous, request.senders, rank, request.bucket_bytes)
    raise ConfigError(
        f"transport {request.transport!r} is unknown, or lacks its rendezvous or shared memory"
    )
