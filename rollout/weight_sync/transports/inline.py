"""The road inside the channel itself: buckets travel with their announcement.

In process that is a reference, to a subprocess rank one copy over its pipe, over gRPC a message.
"""

from __future__ import annotations

from torch import Tensor

from rollout.distributed import Rendezvous
from rollout.errors import TransferFailed
from rollout.updates import BucketHeader, SharedBuckets, WeightChannel


class InlineSender:
    """Hands each payload to the channel."""

    name = "inline"

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
