"""GPU memory of a trainer that the engine's ranks map: its weights where they lie, and buckets.

Tensors that stay where they are during the update are read there: their allocations' handles come
with the announcement, ranks map each once, and unmap it when the update ends. Nothing is kept
between updates: freeing memory that another process has mapped is undefined. What cannot be mapped
is packed into buckets.

Buckets are packed into memory that is lent (``lent_memory``), which also has the ranks' flags.

Behind a fleet's front the ranks of several engines map it, each engine's with flags of their own,
which the front deals out. Where it has members that cannot map it, everything is packed, and each
bucket brings its bytes for those. A member that was given up may still read what the trainer writes
again: then its digests differ, and its update is over anyhow.

Handles are ``cuda_memory``'s. A MIG slice has no such handles; other transports than this one are
taken there.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.in_place import Given, InPlaceHeaders
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Mappers,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.transports import lent_memory
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
from rollout.weight_sync.transports.cuda_handles import GivenHandles
from rollout.weight_sync.transports.cuda_memory import (
    FLAGS,
    device_of,
    gpu_uuid,
    read_handle,
    unpack_handle,
    whole_pages,
)
from rollout.weight_sync.transports.host import host_id
from rollout.weight_sync.transports.lent_memory import (
    LentMemory,
    Mapped,
    MappedLent,
    MappedRegions,
    until_unread,
)
from rollout.weight_sync.transports.shared_memory import half_of
from rollout.wire.codec import ADDED, Count, Positive, Text, to_plain

MAX_HALF = 256 << 20
_LEAST_HALF = 1 << 20  # twice that is a block of the driver's: what is shorter shares one


def why_not(info: WeightInfo) -> str | None:
    """Why this process cannot share GPU memory with the engine's ranks; None where it can."""
    if host_id() not in {info.host, *info.hosts} - {""}:
        return "the engine is on another host"
    if "ipc" not in info.transports:
        return "no rank there maps memory of a GPU of this host"
    if not torch.cuda.is_available():
        return "this process has no GPU"
    if not info.devices or not all(info.devices):
        return "a rank's GPU has no UUID to share memory by (MIG)"
    here = gpu_uuid(torch.device("cuda", torch.cuda.current_device()))
    if not here:
        return "this process's GPU has no UUID to share memory by (MIG)"
    if len(info.devices) > 1 and "regions" in info.features and not info.reaches:
        return "there is no GPU that all of its ranks see"
    if info.reaches and here not in info.reaches:
        return f"its ranks do not reach this process's GPU ({here}): they do not see it, or no peer"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAllocation:
    """The memory: the offer of this transport. See ``pack_handle``; halves of ``half`` bytes.

    ``flags``: how many ranks have one that the sender looks at, over all engines; 0: those of one
    engine, says a sender that knows of no others. ``first``: the flag of the engine's rank 0.
    ``host``: the sender's, for a front elsewhere.
    """

    handle: Text
    secret: Text
    half: Positive
    flags: Count = field(default=0, metadata=ADDED)
    first: Count = field(default=0, metadata=ADDED)
    host: Text = field(default="", metadata=ADDED)

    @property
    def size(self) -> int:
        return FLAGS + 2 * self.half

    @property
    def gpu(self) -> str:
        """The UUID of the GPU that it is memory of; ``ValueError`` where it is malformed."""
        return unpack_handle(self.handle, self.size, self.secret)[0]


class CudaIpc(Transport):
    name = "ipc"
    maps = True

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        if holding is not None and holding.not_mapped is None:
            return "same host, and its ranks map what each trainer rank holds"
        return "same host, and its GPUs' memory can be mapped"

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return why_not(info)

    def open(self, opening: Opening) -> Sender:
        return CudaIpcSender(
            *(opening.info, opening.bucket_bytes, opening.timeout, opening.staying),
            headers=opening.headers,
            mapped=opening.mapped,
        )

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        offer_of(SharedAllocation, request)
        return Accepted()

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        shared = offer_of(SharedAllocation, request)
        return CudaIpcReceiver(shared, at.rank, request.bucket_bytes, torch.device(at.device))


class CudaIpcSender(Sender):
    """Allocates on this process's current GPU.

    ``buffers``: the two halves, no longer than ``bucket_bytes`` (in whole pages) or the update;
    short where all of it will be read where it lies: what is packed after all takes many.
    """

    bytes_go = "memory"

    def __init__(
        self,
        info: WeightInfo,
        bucket_bytes: int,
        timeout: float,
        staying: Callable[[], Sequence[Tensor]] = tuple,
        headers: InPlaceHeaders | None = None,
        mapped: bool = False,
    ) -> None:
        deals = bool(info.hosts)  # a fleet, which tells of every rank that may map it
        num_flags = min(len(info.devices), FLAGS) if deals else info.num_ranks
        self._timeout, self._maps = timeout, "regions" in info.features
        self._headers = headers or InPlaceHeaders()
        self._mappers: Mappers | None = None
        self._unread: set[int] = set()  # buckets in the source's own memory, not taken yet
        self._handles = GivenHandles(secrets.token_hex(16), info.reaches)
        needed = sum(meta.nbytes + 512 for meta in info.tensors)
        # Of a fleet there may be members that map nothing.
        if not deals and (mapped or self._map_all(staying())):
            needed = min(needed, _LEAST_HALF)
        half = whole_pages(min(bucket_bytes, needed, MAX_HALF))
        try:
            memory = LentMemory(half, num_flags, self._handles)
        except TransferFailed:
            self._handles.close()
            raise
        self._memory: LentMemory | None = memory
        self.buffers = memory.halves
        shared = SharedAllocation(handle=memory.handle, secret=self._handles.secret, half=half)
        if deals:
            shared = replace(shared, flags=num_flags, host=host_id())
        self.offer = to_plain(shared)

    def accepted(self, begun: Begun) -> None:
        self._mappers = begun.mappers
        if begun.mappers is not None and self._memory is not None:
            self._memory.num_flags = min(self._memory.num_flags, begun.mappers.ranks)
            self._handles.reaches = frozenset(begun.mappers.reaches)

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        channel.wait(0, timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        half = self.buffers[header.index % 2][: header.nbytes]
        if half.data_ptr() != payload.data_ptr():
            half.copy_(payload)
        # A rank's stream knows nothing of ours: what is announced has to be there.
        torch.cuda.current_stream(half.device).synchronize()
        channel.bucket(header, half.cpu() if self._carries else None)

    @property
    def _carries(self) -> str:
        return "" if self._mappers is None else self._mappers.carries

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        channel.wait(index, timeout)
        self._unread -= {taken for taken in self._unread if taken <= index}

    def why_packed(self, channel: WeightChannel, tensor: Tensor) -> str | None:
        if not self._maps:
            return "the engine is of a version that maps no memory but buckets"
        return self._carries or self._handles.why_not(tensor)

    def _map_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ranks will read all of them where they lie: there are some, and nothing else."""
        return self._maps and bool(tensors) and not any(map(self._handles.why_not, tensors))

    def lend(self, gpus: Iterable[str]) -> Mapping[str, Any] | None:
        reaches = self._handles.reaches
        if not self._maps or self._carries or (reaches and not reaches.issuperset(gpus)):
            return None
        return None if self._memory is None else {"flags": self._memory.num_flags}

    def in_place(
        self, channel: WeightChannel, header: BucketHeader, regions: Sequence[Tensor]
    ) -> None:
        """Announce where the tensors lie within the allocations around them."""
        self.given(channel, header, [self.give(regions)])

    def give(self, tensors: Sequence[Tensor]) -> Given:
        if self._mappers is not None and self._memory is not None:
            self._memory.kept += tensors  # which a member that was given up may read
        return self._handles.give(tensors)

    def given(self, channel: WeightChannel, header: BucketHeader, given: Sequence[Given]) -> None:
        self._unread.add(header.index)
        handles = tuple(handle for one in given for handle in one.handles)
        entries = self._headers.placed(header, given)
        channel.bucket(BucketHeader(header.index, entries, 0, regions=handles), None)

    def close(self) -> None:
        """Let go; the memory is freed in the background once no rank has it open."""
        memory, self._memory = self._memory, None
        if memory is not None and self._unread:
            until_unread(memory.flags, self._timeout)
        self._handles.close()
        if memory is not None:
            self.buffers = ()
            memory.close()


class CudaIpcLender:
    """Another trainer rank than the first, whose tensors the engine's ranks map, too.

    ``offer``: the first one's, in whose memory the flags lie, ``num_flags`` of them.
    """

    def __init__(self, offer: SharedAllocation, num_flags: int, timeout: float) -> None:
        self._handles = GivenHandles(offer.secret)
        self._offer, self._num_flags, self._timeout = offer, num_flags, timeout

    def until_unread(self) -> None:
        """After a failure: until no rank reads this process's tensors any more. Looked at from here
        no sooner: what maps memory of another GPU may take some of that.
        """
        flags = self._flags()
        if flags is None:
            time.sleep(min(self._timeout, lent_memory.OPEN_WAIT))  # the engine has heard by then
        else:
            until_unread(flags, self._timeout)

    def _flags(self) -> Tensor | None:
        """None where this rank does not see them, and where they are gone: were they freed, as no
        rank had them open, or is the first rank's process dead, while the engine still reads?
        """
        shared = self._offer
        uuid, handle = unpack_handle(shared.handle, shared.size, shared.secret)
        owner = device_of(uuid)
        if owner is None:
            return None
        seen = Mapped(shared.secret, owner, torch.cuda.current_stream(owner))
        try:
            return seen.map(shared.size, handle)[: self._num_flags]
        except TransferFailed:
            return None

    def give(self, tensors: Sequence[Tensor]) -> Given:
        return self._handles.give(tensors)

    def close(self) -> None:
        self._handles.close()


class CudaIpcReceiver:
    """Maps the sender's memory after checking what it is, and reads each bucket where it lies."""

    def __init__(
        self, shared: SharedAllocation, rank: int, bucket_bytes: int, device: torch.device
    ) -> None:
        self._shared, self._rank, self._device = shared, rank, device
        self._flag = shared.first + rank
        self._limit = whole_pages(bucket_bytes)
        self._memory: Tensor | None = None
        self._mapped: dict[str, Tensor] = {}  # of the sender's own allocations, by handle
        self._owners: dict[str, torch.device] = {}  # by UUID
        self._reads: Any = None  # the stream on which this rank reads: the staging thread's

    def connect(self, timeout: float) -> None:
        shared = self._shared
        if shared.half % FLAGS or not 0 < shared.half <= min(self._limit, MAX_HALF):
            raise self._refused(f"halves of {shared.half} bytes were not agreed on")
        size, flags = shared.size, min(shared.flags or FLAGS, FLAGS)
        if self._flag >= flags:
            raise self._refused(f"it has flags for {flags} ranks")
        try:
            uuid, handle = unpack_handle(shared.handle, size, shared.secret)
        except ValueError as error:
            raise self._refused(str(error)) from error
        owner = self._owner(uuid)
        self._reads = torch.cuda.current_stream(self._device)
        flagged = MappedLent(shared.secret, owner, self._reads, self._flag)
        self._memory = flagged.map(size, handle)

    def _owner(self, uuid: str) -> torch.device:
        """The GPU of this UUID, looked for once an update."""
        if uuid not in self._owners:
            found = device_of(uuid)
            if found is None:
                raise self._refused(f"this rank does not see the GPU {uuid}")
            self._owners[uuid] = found
        return self._owners[uuid]

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        return half_of(self._memory, FLAGS, self._shared.half, header, self._rank)

    def regions(self, header: BucketHeader, carried: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The sender's allocations, mapped once an update."""
        mapped, memory = self._mapped, self._memory
        if memory is None:
            raise TransferFailed(f"rank {self._rank}: the transfer was given up")
        new: dict[torch.device, list[tuple[str, int, bytes]]] = {}
        for text in dict.fromkeys(header.regions):
            if text not in mapped:
                owner, size, handle = self._read(text)
                new.setdefault(owner, []).append((text, size, handle))
        for owner, found in new.items():
            regions = MappedRegions(self._shared.secret, owner, self._reads, memory)
            tensors = regions.map_all([(size, handle) for _, size, handle in found])
            mapped |= zip((text for text, _, _ in found), tensors, strict=True)
        return [mapped[text] for text in header.regions]

    def _read(self, text: str) -> tuple[torch.device, int, bytes]:
        try:
            uuid, size, handle = read_handle(text, self._shared.secret)
        except ValueError as error:
            raise self._refused(str(error)) from error
        return self._owner(uuid), size, handle

    def close(self) -> None:
        # Unmapped when the last view is gone; the flag is cleared after all else.
        self._mapped = {}
        self._memory = None

    def _refused(self, why: str) -> TransferFailed:
        return TransferFailed(f"rank {self._rank}: the shared GPU memory is refused: {why}")
