"""The roads inside the channel itself: buckets travel with their announcement.

``inline``: in process that is a reference, to other ranks one copy into what they share, over gRPC
messages of the update's stream. ``grpc_stream`` is the last of these for a service elsewhere: one
stream to its one port, which goes on where it was when its connection is cut.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from rollout.distributed import LOOPBACK, Rendezvous
from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.messages import (
    BucketHeader,
    SharedBuckets,
    WeightChannel,
    WeightInfo,
)

GRACE = 5.0  # seconds


@dataclass(frozen=True, slots=True)
class GrpcStream:
    """The road "grpc_stream" with another ``grace`` than its default, where a transport is asked.

    ``grace``: seconds in which a cut connection may be made again before the update is aborted,
    and for which a client that died holds the engine's lease; 0 to 60. A cut costs at most
    ``bucket_bytes`` and one bucket's announcement sent twice.
    """

    grace: float = GRACE

    def __call__(self, info: WeightInfo, timeout: float, host: str = LOOPBACK) -> InlineSender:
        if "grpc_stream" not in info.transports:
            raise ConfigError(
                "grpc_stream leads to the port of a service, but the engine offers "
                f"{', '.join(info.transports)} alone: use transport='auto'"
            )
        if not 0 <= self.grace <= 60:
            raise ConfigError(f"grace must be 0 to 60 seconds, got {self.grace}")
        return InlineSender("grpc_stream", self.grace)


class InlineSender:
    """Hands each payload to the channel."""

    def __init__(self, name: str = "inline", grace: float = 0.0) -> None:
        self.name, self.grace = name, grace

    def buffers(self, bucket_bytes: int) -> tuple[Tensor, ...]:
        return ()

    def rendezvous(self) -> Rendezvous | None:
        return None

    def shared(self) -> SharedBuckets | None:
        return None

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        return None

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        channel.bucket(header, payload.cpu())

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        channel.wait(index, timeout)

    def close(self) -> None:
        return None


class InlineReceiver:
    """Takes the payload that came with the announcement."""

    def connect(self, timeout: float) -> None:
        return None

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        if carried is None or carried.numel() != header.nbytes:
            got = 0 if carried is None else carried.numel()
            raise TransferFailed(
                f"bucket {header.index} announced {header.nbytes} bytes but carried {got}"
            )
        return carried

    def close(self) -> None:
        return None
