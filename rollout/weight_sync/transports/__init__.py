"""How the bytes of a bucket get from the sender to every rank. A transport never knows a model.

The sender announces a bucket on the channel, which reaches all ranks in one order, then moves its
bytes; a rank posts its receive when it sees the announcement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from rollout.distributed import Rendezvous
from rollout.errors import ConfigError
from rollout.updates import BucketHeader, UpdateRequest, WeightChannel, WeightInfo

TRANSPORTS = ("inline", "broadcast")


class Sender(Protocol):
    """The trainer's end of a road; used by one thread, closed by whoever made it."""

    name: str

    def rendezvous(self) -> Rendezvous | None:
        """Where the ranks will meet this sender; None when the road needs no group."""
        ...

    def connect(self, timeout: float) -> None:
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


SenderFactory = Callable[[WeightInfo, float], Sender]


def make_sender(transport: str | SenderFactory, info: WeightInfo, timeout: float) -> Sender:
    """The sender for ``transport``: a name of ``TRANSPORTS``, "auto", or a factory of one.

    "auto" takes the first road that the engine announced.
    """
    if callable(transport):
        return transport(info, timeout)
    name = info.transports[0] if transport == "auto" else transport
    if name not in TRANSPORTS:
        raise ConfigError(f"unknown transport {name!r}; known: auto, {', '.join(TRANSPORTS)}")
    if name == "inline":
        from rollout.weight_sync.transports.inline import InlineSender

        return InlineSender()
    from rollout.weight_sync.transports.broadcast import BroadcastSender

    return BroadcastSender(info, timeout)


def make_receiver(request: UpdateRequest, rank: int, device: str) -> Receiver:
    """The receiver that matches an accepted update request, for engine rank ``rank``."""
    if request.transport == "inline":
        from rollout.weight_sync.transports.inline import InlineReceiver

        return InlineReceiver()
    if request.transport == "broadcast" and request.rendezvous is not None:
        from rollout.weight_sync.transports.broadcast import BroadcastReceiver

        return BroadcastReceiver(request.rendezvous, rank, device)
    raise ConfigError(f"transport {request.transport!r} is unknown or lacks its rendezvous")
