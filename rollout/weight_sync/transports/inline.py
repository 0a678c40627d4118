"""The transports inside the channel itself: buckets travel with their announcement.

``inline``: in process that is a reference, to other ranks one copy into what they share, over gRPC
messages of the update's stream. ``grpc_stream`` is the last of these for a service elsewhere: one
stream to its one port, or one of each trainer rank, which go on where they were when a connection
is cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.channel import InPlaceChannel, WeightChannel
from rollout.weight_sync.protocol.link import StreamOffer
from rollout.weight_sync.protocol.messages import BucketHeader, UpdateRequest, WeightInfo
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

GRACE = 5.0  # seconds
MAX_GRACE = 60.0
MAX_SENDERS = 1 << 16


class InlineSender(Sender):
    """Hands each payload to the channel."""

    bytes_go = "channel"

    def __init__(self, offer: StreamOffer | None = None) -> None:
        self.offer = asdict(offer or StreamOffer())
        self._reads_on: torch.device | None = None  # the device of the rank in this process

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        channel.bucket(header, payload.cpu())

    def why_packed(self, channel: WeightChannel, tensor: Tensor) -> str | None:
        if self._reads_on is None:
            on: str = getattr(channel, "reads_on", "")  # of an ``InPlaceChannel``
            if not on:
                return "no rank runs in this process"
            self._reads_on = torch.device(on)
        if tensor.device != self._reads_on:
            return f"it lies on {tensor.device}, the rank runs on {self._reads_on}"
        return None if tensor.is_contiguous() else "it is not contiguous"

    def in_place(
        self, channel: WeightChannel, header: BucketHeader, regions: Sequence[Tensor]
    ) -> None:
        assert isinstance(channel, InPlaceChannel)
        if regions and regions[0].device.type == "cuda":
            # The rank's stream knows nothing of ours.
            torch.cuda.current_stream(regions[0].device).synchronize()
        channel.in_place(header, regions)


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

    def regions(self, header: BucketHeader, carried: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """Tensors of this process; nothing that came over a connection can name any."""
        found = [carried[key] for key in map(str, range(len(carried))) if key in carried]
        if len(found) != len(carried) or not found:
            raise TransferFailed(f"bucket {header.index} came without the tensors that it names")
        return found

    def close(self) -> None:
        return None


class Inline(Transport):
    name = "inline"
    in_process = fallback = True
    served_as = "grpc_stream"

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        if holding is not None and holding.split and holding.not_mapped is None:
            return None  # the rank reads what the others hold, too, without a gather
        near = info.transports[:1] == (self.name,) and info.num_ranks == 1
        return "the engine is in this process" if near else None

    def open(self, opening: Opening) -> Sender:
        return InlineSender()

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        said = offer_of(StreamOffer, request) if request.offer else StreamOffer()
        if not 0 <= said.grace <= MAX_GRACE:
            raise ConfigError(f"grace must be 0 to {MAX_GRACE:g} seconds, got {said.grace}")
        if said.senders > MAX_SENDERS:
            raise ConfigError(f"senders must be 1 to {MAX_SENDERS}, got {said.senders}")
        return Accepted(senders=said.senders, on_channel=True)

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        return InlineReceiver()


@dataclass(frozen=True)
class GrpcStream(Inline):
    """``grpc_stream`` with another ``grace`` than its default, where a transport is asked for.

    ``grace``: seconds in which a cut connection may be made again before the update is aborted,
    and for which a client that died holds the engine's lease; 0 to 60. A cut costs at most
    ``bucket_bytes`` and one bucket's announcement sent twice.
    """

    grace: float = GRACE

    name: ClassVar[str] = "grpc_stream"
    in_process = offered = False
    served_as: ClassVar[str] = ""

    @property
    def streams(self) -> bool:
        return self.grace > 0

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return None

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        if self.name not in info.transports:
            return (
                "it leads to the port of a service, but the engine offers "
                f"{', '.join(info.transports)} alone"
            )
        if not 0 <= self.grace <= MAX_GRACE:
            return f"grace must be 0 to {MAX_GRACE:g} seconds, got {self.grace}"
        return None

    def open(self, opening: Opening) -> Sender:
        return InlineSender(StreamOffer(grace=self.grace, senders=opening.senders))
