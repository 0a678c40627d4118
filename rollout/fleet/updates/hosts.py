"""A member's part of an update, and the memory of the front's host that its bytes lie in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rollout.errors import ConfigError, TransferFailed
from rollout.fleet.updates.ways import FRONT
from rollout.rpc.update_channel import GrpcWeightChannel
from rollout.weight_sync.protocol.messages import (
    BucketHeader,
    Mappers,
    UpdateRequest,
)
from rollout.weight_sync.transports.cuda_ipc import SharedAllocation
from rollout.weight_sync.transports.cuda_memory import FLAGS
from rollout.weight_sync.transports.shared_memory import IpcReceiver, IpcSender, SharedFile
from rollout.wire.codec import from_plain, to_plain


@dataclass(slots=True)
class Part:
    """A member's part of an update.

    ``host``: ``Link.place``. ``relays``: whether it may be one of a chain. ``maps``: whose memory
    its ranks read, a member's, the front's or the trainer's GPU's; "" where bytes are sent to it:
    by ``feeder``, a member, or "", the front. ``feed``: what the feeder has to know. ``fed_by``:
    for the receipt. ``got``: how many buckets were announced to it.
    """

    name: str
    channel: GrpcWeightChannel
    host: str
    relays: bool = False
    maps: str = ""
    feed: str = ""
    feeder: str = ""
    fed_by: str = FRONT
    got: int = 0
    sent: int = 0  # bytes

    def announce(self, header: BucketHeader, payload: Tensor | None) -> None:
        self.got = header.index + 1
        if payload is not None:
            self.sent += header.nbytes
        self.channel.bucket(header, payload)

    def is_lost(self, index: int, why: str) -> None:
        """Its feeder did not bring bucket ``index``: from there on the front sends to it."""
        self.fed_by = f"{self.feeder}; {FRONT} from bucket {index} on: {why}"[:300]
        self.feeder, self.got = "", index


@dataclass(slots=True)
class HostMemory:
    """What lies in the memory of the front's host: the trainer's buckets, or the front's copy.

    ``offer``: by which members map it; {} where there is none.
    """

    offer: Mapping[str, Any] = field(default_factory=dict)
    _sender: IpcSender | None = None
    _receiver: IpcReceiver | None = None

    @classmethod
    def of_trainer(cls, request: UpdateRequest, *, read: bool) -> HostMemory:
        """The memory that the trainer writes; ``read``: the front itself has to, for others."""
        if not read:
            return cls(request.offer)
        shared = from_plain(SharedFile, dict(request.offer))
        receiver = IpcReceiver(shared, 0, request.bucket_bytes)
        receiver.connect(request.timeout)
        return cls(request.offer, None, receiver)

    @classmethod
    def of_front(cls, request: UpdateRequest) -> HostMemory:
        """Memory of the front, for buckets that come with their bytes; none where it is refused."""
        try:
            sender = IpcSender.of_packed(request)
        except TransferFailed:
            return cls()
        return cls(sender.offer, sender)

    def put(self, header: BucketHeader, payload: Tensor) -> None:
        """Have a bucket lie there, where the front is who writes it."""
        if self._sender is not None:
            self._sender.put(header, payload)

    def get(self, header: BucketHeader, timeout: float) -> Tensor | None:
        """A bucket's bytes as the trainer wrote them, until it may write there again."""
        return None if self._receiver is None else self._receiver.receive(header, None, timeout)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        if self._receiver is not None:
            self._receiver.close()


@dataclass(frozen=True, slots=True)
class CardMemory:
    """Memory of a trainer's GPU, and who maps it; the front itself reads none of it.

    ``offers``: of each member that does, with flags of its own. ``mappers``: for the trainer.
    """

    offers: Mapping[str, Mapping[str, Any]]
    mappers: Mappers

    @classmethod
    def offered(cls, request: UpdateRequest) -> SharedAllocation | None:
        """What the trainer offers, if it is a GPU's. ``ConfigError`` where it cannot be several
        engines'.
        """
        if request.transport != "ipc" or "handle" not in request.offer:
            return None
        shared = from_plain(SharedAllocation, dict(request.offer))
        if not shared.flags:
            raise ConfigError(
                "the trainer's version of rollout shares a GPU's memory with one engine alone: "
                "update it there, or use transport='auto', by which the bytes go with the calls"
            )
        return shared

    @classmethod
    def of(
        cls,
        shared: SharedAllocation,
        reaches: Mapping[str, frozenset[str]],
        ranks: Mapping[str, int],
    ) -> CardMemory:
        """``reaches``: the GPUs that each member can map, in the order in which they take part;
        ``ranks``: how many it has. ``ConfigError`` where none maps this one.
        """
        gpu, offers, first = card_of(shared), dict[str, Mapping[str, Any]](), 0
        for name, found in reaches.items():
            if gpu in found and first + ranks[name] <= min(shared.flags, FLAGS):
                offers[name] = to_plain(replace(shared, first=first))
                first += ranks[name]
        if not offers:
            raise nobody_maps(gpu)
        common = frozenset.intersection(*(reaches[name] for name in offers))
        left = [name for name in reaches if name not in offers]
        why = f"sent the bytes, since they do not map this GPU: {', '.join(left)}" if left else ""
        mappers = Mappers(ranks=first, reaches=tuple(sorted(common)), carries=why[:300])
        return cls(offers, mappers)


def card_of(shared: SharedAllocation) -> str:
    try:
        return shared.gpu
    except ValueError as error:
        raise ConfigError(f"the shared GPU memory is refused: {error}") from error


def nobody_maps(gpu: str) -> ConfigError:
    return ConfigError(
        f"no member of the fleet maps memory of the GPU {gpu}: its ranks have to be on the "
        "trainer's host and see that GPU (CUDA_VISIBLE_DEVICES); use transport='auto', by which "
        "the bytes go with the calls"
    )
