"""GPU memory of a trainer that the engine's ranks map: its weights where they lie, and buckets.

Tensors that stay where they are during the update are read there: their allocations' handles come
with the announcement, ranks map each once, and unmap it when the update ends. Nothing is kept
between updates: freeing memory that another process has mapped is undefined. What cannot be mapped
is packed into buckets.

For the buckets the sender owns one allocation made by the CUDA runtime itself: memory of torch's
caching allocator cannot be shared once ``expandable_segments`` is on. It holds a page of flags, one
byte a rank, and two halves that buckets are packed into.

Behind a fleet's front the ranks of several engines map it, each engine's with flags of their own,
which the front deals out. Where it has members that cannot map it, everything is packed, and each
bucket brings its bytes for those. A member that was given up may still read what the trainer writes
again: then its digests differ, and its update is over anyhow.

Handles are ``cuda_memory``'s. Memory is
freed when no rank has it open: a rank sets its flag when it maps the memory and clears it after its
last read; one that has never set it gets some time to, in case it is about to. A MIG slice has no
such handles; other transports than this one are taken there.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.distributed.native_thread import NativeThread
from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.bucket_packer import InPlaceHeaders
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Mappers,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.transports import cuda_memory
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
from rollout.weight_sync.transports.cuda_memory import (
    FLAGS,
    Allocation,
    ForeignMemory,
    SharedAt,
    device_of,
    gpu_uuid,
    pack_handle,
    read_handle,
    tensor_at,
    unpack_handle,
    whole_pages,
)
from rollout.weight_sync.transports.host import host_id
from rollout.weight_sync.transports.shared_memory import half_of
from rollout.wire.codec import ADDED, Count, Positive, Text, to_plain

MAX_HALF = 256 << 20
_LEAST_HALF = 1 << 20  # twice that is a block of the driver's: what is shorter shares one

_OPEN, _CLOSED = 1, 2
_FREE_WAIT, _FREE_POLL = 60.0, 0.05  # seconds
_OPEN_WAIT = 2.0  # seconds from mapping the memory to setting the flag
_log = logging.getLogger(__name__)


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
    if info.reaches and here not in info.reaches:
        return f"its ranks do not reach this process's GPU ({here}): they do not see it, or no peer"
    return None


def released(flags: Tensor, waited: float = _OPEN_WAIT) -> bool:
    """Whether no rank has the memory open, ``waited`` seconds after the end; uint8, one a rank."""
    if waited < _OPEN_WAIT:
        return bool((flags == _CLOSED).all())
    return not bool((flags == _OPEN).any())


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

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return "same host, and its GPUs' memory can be mapped"

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return why_not(info)

    def open(self, opening: Opening) -> Sender:
        return CudaIpcSender(
            *(opening.info, opening.bucket_bytes, opening.timeout, opening.staying),
            headers=opening.headers,
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
    ) -> None:
        deals = bool(info.hosts)  # a fleet, which tells of every rank that may map it
        self._ranks = min(len(info.devices), FLAGS) if deals else info.tensor_parallel_size
        self._timeout, self._maps = timeout, "regions" in info.features
        self._reaches = frozenset(info.reaches)
        self._headers = headers or InPlaceHeaders()
        self._mappers: Mappers | None = None
        self._kept: list[Tensor] = []  # the source's, which a member that was given up may read
        self._starts: list[int] = []  # ascending: of the allocations whose handles were given out
        self._given: list[tuple[Allocation, str]] = []
        self._own: list[SharedAt] = []  # in ``own_handles``
        self._uuids: dict[torch.device, str] = {}
        self._unread: set[int] = set()  # buckets in the source's own memory, not taken yet
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._runtime = cuda_memory.runtime()
        self._secret = secret = secrets.token_hex(16)
        self._runtime.enter()
        needed = sum(meta.nbytes + 512 for meta in info.tensors)
        # Of a fleet there may be members that map nothing.
        if not deals and self._map_all(staying()):
            needed = min(needed, _LEAST_HALF)
        half = whole_pages(min(bucket_bytes, needed, MAX_HALF))
        size = FLAGS + 2 * half
        self._pointer = 0
        with torch.cuda.device(self._device):
            try:
                self._pointer = self._runtime.allocate(size)
                handle = self._own_handle(self._pointer)
            except TransferFailed:
                self._disown()
                if self._pointer:
                    self._runtime.free(self._pointer)
                raise
        whole = self._whole = tensor_at(self._pointer, size, self._device)
        whole[:FLAGS].zero_()
        self.buffers = whole[FLAGS : FLAGS + half], whole[FLAGS + half :]
        packed = pack_handle(gpu_uuid(self._device), size, secret, handle)
        shared = SharedAllocation(handle=packed, secret=secret, half=half)
        if deals:
            shared = replace(shared, flags=self._ranks, host=host_id())
        self.offer = to_plain(shared)
        torch.cuda.current_stream(self._device).synchronize()

    def accepted(self, begun: Begun) -> None:
        self._mappers = begun.mappers
        if begun.mappers is not None:
            self._ranks = min(self._ranks, begun.mappers.ranks)
            self._reaches = frozenset(begun.mappers.reaches)

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        channel.wait(0, timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        half = self.buffers[header.index % 2][: header.nbytes]
        if half.data_ptr() != payload.data_ptr():
            half.copy_(payload)
        # A rank's stream knows nothing of ours: what is announced has to be there.
        torch.cuda.current_stream(self._device).synchronize()
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
        return self._carries or self._why_not_mapped(tensor)

    def _map_all(self, tensors: Sequence[Tensor]) -> bool:
        """Whether ranks will read all of them where they lie: there are some, and nothing else."""
        return self._maps and bool(tensors) and not any(map(self._why_not_mapped, tensors))

    def _why_not_mapped(self, tensor: Tensor) -> str | None:
        if not tensor.is_contiguous():
            return "it is not contiguous"
        uuid = self._uuid(tensor.device)
        if not uuid:
            return "its GPU has no UUID to share memory by (MIG)"
        if self._reaches and uuid not in self._reaches:
            return "it lies on a GPU that not all ranks reach"
        try:
            self._handle(tensor)
        except TransferFailed as error:
            return f"its memory cannot be mapped: {error}"
        return None

    def in_place(
        self, channel: WeightChannel, header: BucketHeader, regions: Sequence[Tensor]
    ) -> None:
        """Announce where the tensors lie within the allocations around them."""
        self._runtime.enter()  # on a thread of the sender's own
        handles: dict[str, int] = {}
        places = []
        for region in regions:
            around, handle = self._handle(region)
            at = handles.setdefault(handle, len(handles))
            places.append((at, region.data_ptr() - around.start))
        for device in {region.device for region in regions}:
            torch.cuda.synchronize(device)  # a rank's stream knows nothing of ours
        self._unread.add(header.index)
        if self._mappers is not None:
            self._kept += regions
        entries = self._headers.placed(header, places)
        channel.bucket(replace(header, entries=entries, regions=tuple(handles)), None)

    def _handle(self, tensor: Tensor) -> tuple[Allocation, str]:
        """The allocation around a tensor, and its handle; ``TransferFailed`` where it has none."""
        start, size = tensor.data_ptr(), tensor.nbytes
        at = bisect_right(self._starts, start)
        if at:
            around, handle = self._given[at - 1]
            if start + size <= around.start + around.nbytes:
                return around, handle
        around = self._runtime.around(start)
        if not around.shareable:
            raise TransferFailed(
                "it is no allocation of cudaMalloc's (torch's expandable_segments have none)"
            )
        if start + size > around.start + around.nbytes:
            raise TransferFailed("it reaches over several allocations")
        with torch.cuda.device(tensor.device):
            raw = self._own_handle(around.start)
        handle = pack_handle(self._uuid(tensor.device), around.nbytes, self._secret, raw)
        self._starts.insert(at, around.start)
        self._given.insert(at, (around, handle))
        return around, handle

    def _own_handle(self, start: int) -> bytes:
        """Of an allocation; a rank of this process finds it by that."""
        handle = self._runtime.handle(start)
        self._own.append((self._secret, handle))
        cuda_memory.own_handles()[self._own[-1]] = start
        return handle

    def _disown(self) -> None:
        while self._own:
            cuda_memory.own_handles().pop(self._own.pop(), None)

    def _uuid(self, device: torch.device) -> str:
        if device not in self._uuids:
            self._uuids[device] = gpu_uuid(device)
        return self._uuids[device]

    def _until_unread(self) -> None:
        """After a failure: what belongs to the source is the trainer's again only when no rank
        reads it any more. A rank that died leaves its flag set, which bounds the wait.
        """
        deadline = time.monotonic() + self._timeout
        flags = self._whole[: self._ranks]
        while bool((flags == _OPEN).any()):
            if time.monotonic() > deadline:
                _log.warning("a rank has not said that it stopped reading this process's tensors")
                break
            time.sleep(_FREE_POLL / 10)
        self._unread.clear()

    def close(self) -> None:
        """Let go; the memory is freed in the background once no rank has it open."""
        if self._unread and self._pointer:
            self._until_unread()
        pointer, self._pointer = self._pointer, 0
        self._disown()
        if pointer:
            whole, self.buffers = self._whole, ()
            del self._whole
            over = threading.Event()  # the program ends, which frees it, too
            flags = whole[: self._ranks]
            kept, self._kept = self._kept, []
            free = partial(_free, self._runtime, pointer, flags, self._device, over, kept)
            NativeThread("free-ipc", free, over.set).start()


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
        flagged = _Flagged(shared.secret, owner, self._reads, self._flag)
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
            regions = _Regions(self._shared.secret, owner, self._reads, memory)
            tensors = regions.map([(size, handle) for _, size, handle in found])
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


class _Mapping:
    """Memory of a sender: of another process by its handles, of this one as it lies there.

    Unmapped when the last view of it is gone. ``reads``: the stream of what reads it.
    """

    def __init__(self, secret: str, owner: torch.device, reads: Any) -> None:
        self._opened: list[int] = []
        self._secret, self._owner, self._reads = secret, owner, reads
        self._runtime = cuda_memory.runtime()

    def _start(self, handle: bytes) -> int:
        own = cuda_memory.own_handles().get((self._secret, handle))
        if own is not None:
            return own
        self._opened.append(self._runtime.open(handle))
        return self._opened[-1]

    def _view(self, start: int, nbytes: int) -> Tensor:
        return torch.as_tensor(ForeignMemory(start, nbytes, keeps=self), device=self._owner)

    def __del__(self) -> None:
        try:
            self._reads.synchronize()  # a launch may still read it
            with torch.cuda.device(self._owner):
                self._leave()
                while self._opened:
                    self._runtime.close(self._opened.pop())
        except (TransferFailed, RuntimeError) as error:
            _log.warning("a sender's GPU memory could not be unmapped: %s", error)

    def _leave(self) -> None:
        """Nothing reads it any more."""


class _Regions(_Mapping):
    """Allocations of a sender's own, as long as the update or a view of one of them lasts.

    All of one bucket together: what is asked of CUDA for hundreds of them is asked once, where it
    can be. ``memory``: that with the flags, which says that this process is reading until these are
    gone.
    """

    def __init__(self, secret: str, owner: torch.device, reads: Any, memory: Tensor) -> None:
        super().__init__(secret, owner, reads)
        self._memory = memory

    def map(self, wanted: Sequence[tuple[int, bytes]]) -> list[Tensor]:
        """uint8 [bytes] of each (bytes, handle)."""
        found = []
        with torch.cuda.device(self._owner):
            for nbytes, handle in wanted:
                start = self._start(handle)
                around = self._runtime.around(start)
                mapped = around.start + around.nbytes - start
                if mapped < nbytes:
                    raise TransferFailed(f"{mapped} bytes were mapped, {nbytes} announced")
                found.append(self._view(start, nbytes))
        return found


class _Flagged(_Mapping):
    """The memory with the flags, of which byte ``flag`` says whether this process has it open."""

    _at = 0  # where that byte lies, once it is set

    def __init__(self, secret: str, owner: torch.device, reads: Any, flag: int) -> None:
        super().__init__(secret, owner, reads)
        self._flag, self._writes = flag, torch.cuda.current_stream(owner).cuda_stream

    def map(self, nbytes: int, handle: bytes) -> Tensor:
        """uint8 [bytes]."""
        with torch.cuda.device(self._owner):
            start = self._start(handle)
            self._at = start + self._flag
            self._runtime.set_byte(self._at, _OPEN, self._writes)
            return self._view(start, nbytes)

    def _leave(self) -> None:
        if self._at:
            self._runtime.set_byte(self._at, _CLOSED, self._writes)


def _free(
    runtime: cuda_memory.Runtime,
    pointer: int,
    flags: Tensor,
    device: torch.device,
    over: threading.Event,
    kept: Sequence[Tensor],
) -> None:
    """Freeing what a rank still has open is undefined; a rank that died leaves its flag set.
    ``kept``: tensors of the source, whose memory lives until then, too.
    """
    with torch.cuda.device(device):
        if wait_released(flags, over):
            runtime.free(pointer)


def wait_released(flags: Tensor, over: threading.Event) -> bool:
    """Until no rank has the memory open; False when it has to be left as it is."""
    started = time.monotonic()
    while not released(flags, waited := time.monotonic() - started):
        if waited > _FREE_WAIT:
            _log.warning("GPU memory shared with a rank was never released; it stays allocated")
            return False
        if over.wait(_FREE_POLL):
            return False
    return not over.wait(_FREE_POLL)  # from its flag to its unmapping
