"""Buckets in GPU memory that the engine's ranks map, for a trainer on the GPUs of their host.

The sender owns one allocation made by the CUDA runtime itself: memory of torch's caching allocator
cannot be shared once ``expandable_segments`` is on, and a handle of it would name a whole segment.
It holds a page of flags, one byte a rank, and two halves that buckets are packed into.

The handle travels as plain bytes (a mark, the GPU's UUID, the size, a secret, CUDA's 64 bytes),
never pickled, and the GPU is named by its UUID, since ordinals differ between processes. Memory is
freed when no rank has it open: a rank sets its flag when it maps the memory and clears it after its
last read; one that has never set it gets some time to, in case it is about to. A MIG slice has no
such handles; other transports than this one are taken there.
"""

from __future__ import annotations

import ctypes
import hmac
import logging
import secrets
import struct
import threading
import time
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any
from uuid import UUID

import torch
from torch import Tensor

from rollout.distributed.native_thread import NativeThread
from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.messages import (
    BucketHeader,
    UpdateRequest,
    WeightChannel,
    WeightInfo,
)
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
from rollout.weight_sync.transports.host import host_id
from rollout.weight_sync.transports.shared_memory import half_of
from rollout.wire.codec import Positive, Text

MAX_HALF = 256 << 20
FLAGS = 4096  # bytes before the halves; one for each rank

_OPEN, _CLOSED = 1, 2
_FORM = struct.Struct("<16s16sQ16s64s")  # mark, UUID, bytes, secret, CUDA's handle
_MAGIC = b"rollout-cuda-1"
_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
_FREE_WAIT, _FREE_POLL = 60.0, 0.05  # seconds
_OPEN_WAIT = 2.0  # seconds from mapping the memory to setting the flag
_log = logging.getLogger(__name__)


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``; it is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


class Runtime:
    """The few calls of libcudart that torch does not offer; torch has loaded the library."""

    def __init__(self) -> None:
        major = (torch.version.cuda or "").split(".")[0]
        try:
            self._library = ctypes.CDLL(f"libcudart.so.{major}")
        except OSError as error:
            raise ConfigError(
                f"CUDA IPC needs libcudart.so.{major}, which cannot be loaded ({error}); use "
                "transport='broadcast' or 'auto'"
            ) from error
        self._library.cudaIpcOpenMemHandle.argtypes = (
            ctypes.POINTER(ctypes.c_void_p),
            _Handle,
            ctypes.c_uint,
        )
        self._library.cudaGetErrorString.restype = ctypes.c_char_p

    def allocate(self, nbytes: int) -> int:
        pointer = ctypes.c_void_p()
        self._call("cudaMalloc", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
        return int(pointer.value or 0)

    def free(self, pointer: int) -> None:
        self._call("cudaFree", ctypes.c_void_p(pointer))

    def handle(self, pointer: int) -> bytes:
        found = _Handle()
        self._call("cudaIpcGetMemHandle", ctypes.byref(found), ctypes.c_void_p(pointer))
        return ctypes.string_at(ctypes.addressof(found), 64)

    def open(self, handle: bytes) -> int:
        pointer, wanted = ctypes.c_void_p(), _Handle()
        ctypes.memmove(ctypes.addressof(wanted), handle, 64)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), wanted, _PEER_ACCESS)
        return int(pointer.value or 0)

    def close(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def set_byte(self, pointer: int, value: int) -> None:
        """Write one byte of the current GPU after everything that was asked of it before."""
        self._call("cudaDeviceSynchronize")
        self._call("cudaMemset", ctypes.c_void_p(pointer), value, ctypes.c_size_t(1))
        self._call("cudaDeviceSynchronize")

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            self._library.cudaGetLastError()  # or torch would report it at its next call
            text = self._library.cudaGetErrorString(code).decode()
            raise TransferFailed(f"{name} failed: {text} ({code})")


def gpu_uuid(device: torch.device) -> str:
    """The UUID of a GPU; "" for a CPU, a MIG slice, or where torch does not tell."""
    if device.type != "cuda":
        return ""
    properties: Any = torch.cuda.get_device_properties(device)
    if " MIG " in f"{properties.name} ":
        return ""
    found = str(getattr(properties, "uuid", "")).removeprefix("GPU-")
    try:
        return str(UUID(found))
    except ValueError:
        return ""


def why_not(info: WeightInfo) -> str | None:
    """Why this process cannot share GPU memory with the engine's ranks; None where it can."""
    if not info.host or info.host != host_id():
        return "the engine is on another host"
    if not torch.cuda.is_available():
        return "this process has no GPU"
    if not info.devices or not all(info.devices):
        return "a rank's GPU has no UUID to share memory by (MIG)"
    if not gpu_uuid(torch.device("cuda", torch.cuda.current_device())):
        return "this process's GPU has no UUID to share memory by (MIG)"
    return None


def pack_handle(uuid: str, nbytes: int, secret: str, handle: bytes) -> str:
    """What travels: hexadecimal digits of plain bytes."""
    if len(handle) != 64:
        raise ValueError(f"a handle of CUDA has 64 bytes, not {len(handle)}")
    return _FORM.pack(_MAGIC, UUID(uuid).bytes, nbytes, bytes.fromhex(secret), handle).hex()


def unpack_handle(text: str, nbytes: int, secret: str) -> tuple[str, bytes]:
    """(UUID, CUDA's handle) of memory of ``nbytes`` marked with ``secret``, else ``ValueError``."""
    raw = bytes.fromhex(text)
    if len(raw) != _FORM.size:
        raise ValueError(f"a handle of {len(raw)} bytes, not {_FORM.size}")
    magic, uuid, size, marked, handle = _FORM.unpack(raw)
    if magic.rstrip(b"\0") != _MAGIC or not hmac.compare_digest(marked, bytes.fromhex(secret)):
        raise ValueError("it is not marked as this update's")
    if size != nbytes:
        raise ValueError(f"it has {size} bytes, announced were {nbytes}")
    return str(UUID(bytes=uuid)), handle


def released(flags: Tensor, waited: float = _OPEN_WAIT) -> bool:
    """Whether no rank has the memory open, ``waited`` seconds after the end; uint8, one a rank."""
    if waited < _OPEN_WAIT:
        return bool((flags == _CLOSED).all())
    return not bool((flags == _OPEN).any())


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedAllocation:
    """The memory: the offer of this transport. See ``pack_handle``; halves of ``half`` bytes."""

    handle: Text
    secret: Text
    half: Positive


class CudaIpc(Transport):
    name = "ipc"

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return "same host, and its GPUs' memory can be mapped"

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return why_not(info)

    def open(self, opening: Opening) -> Sender:
        return CudaIpcSender(opening.info, opening.bucket_bytes)

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        offer_of(SharedAllocation, request)
        return Accepted()

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        shared = offer_of(SharedAllocation, request)
        return CudaIpcReceiver(shared, at.rank, request.bucket_bytes, torch.device(at.device))


class CudaIpcSender(Sender):
    """Allocates on this process's current GPU.

    ``buffers``: the two halves, no longer than ``bucket_bytes`` (in whole pages) or the update.
    """

    bytes_go = "memory"

    def __init__(self, info: WeightInfo, bucket_bytes: int) -> None:
        self._ranks = info.tensor_parallel_size
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._runtime = Runtime()
        needed = sum(meta.nbytes + 512 for meta in info.tensors)
        half = whole_pages(min(bucket_bytes, needed, MAX_HALF))
        size, secret = FLAGS + 2 * half, secrets.token_hex(16)
        with torch.cuda.device(self._device):
            self._pointer = self._runtime.allocate(size)
            try:
                handle = self._runtime.handle(self._pointer)
            except TransferFailed:
                self._runtime.free(self._pointer)
                raise
        whole = self._whole = _tensor_at(self._pointer, size, self._device)
        whole[:FLAGS].zero_()
        self.buffers = whole[FLAGS : FLAGS + half], whole[FLAGS + half :]
        packed = pack_handle(gpu_uuid(self._device), size, secret, handle)
        self.offer = asdict(SharedAllocation(handle=packed, secret=secret, half=half))
        torch.cuda.current_stream(self._device).synchronize()

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        channel.wait(0, timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        half = self.buffers[header.index % 2][: header.nbytes]
        if half.data_ptr() != payload.data_ptr():
            half.copy_(payload)
        # A rank's stream knows nothing of ours: what is announced has to be there.
        torch.cuda.current_stream(self._device).synchronize()
        channel.bucket(header, None)

    def close(self) -> None:
        """Let go; the memory is freed in the background once no rank has it open."""
        pointer, self._pointer = self._pointer, 0
        if pointer:
            whole, self.buffers = self._whole, ()
            del self._whole
            over = threading.Event()  # the program ends, which frees it, too
            flags = whole[: self._ranks]
            free = partial(_free, self._runtime, pointer, flags, self._device, over)
            NativeThread("free-ipc", free, over.set).start()


class CudaIpcReceiver:
    """Maps the sender's memory after checking what it is, and reads each bucket where it lies."""

    def __init__(
        self, shared: SharedAllocation, rank: int, bucket_bytes: int, device: torch.device
    ) -> None:
        self._shared, self._rank, self._device = shared, rank, device
        self._limit = whole_pages(bucket_bytes)
        self._memory: Tensor | None = None

    def connect(self, timeout: float) -> None:
        shared = self._shared
        if shared.half % FLAGS or not 0 < shared.half <= min(self._limit, MAX_HALF):
            raise self._refused(f"halves of {shared.half} bytes were not agreed on")
        if self._rank >= FLAGS:
            raise self._refused(f"it has flags for {FLAGS} ranks")
        size = FLAGS + 2 * shared.half
        try:
            uuid, handle = unpack_handle(shared.handle, size, shared.secret)
        except ValueError as error:
            raise self._refused(str(error)) from error
        owner = _device_of(uuid)
        if owner is None:
            raise self._refused(f"this rank does not see the GPU {uuid}")
        with torch.cuda.device(owner):
            self._memory = torch.as_tensor(_Mapped(handle, size, owner, self._rank), device=owner)

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        return half_of(self._memory, FLAGS, self._shared.half, header, self._rank)

    def close(self) -> None:
        self._memory = None  # unmapped when the last view of it is gone

    def _refused(self, why: str) -> TransferFailed:
        return TransferFailed(f"rank {self._rank}: the shared GPU memory is refused: {why}")


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // FLAGS) * FLAGS


class _Memory:
    """Memory that torch may look at but does not own (the CUDA array interface).

    A tensor made of it keeps this object alive.
    """

    def __init__(self, pointer: int, nbytes: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


class _Mapped(_Memory):
    """A sender's memory in this process: flagged while it is open, unmapped at its end."""

    def __init__(self, handle: bytes, nbytes: int, device: torch.device, rank: int) -> None:
        self._runtime, self._device, self._rank = Runtime(), device, rank
        super().__init__(self._runtime.open(handle), nbytes)
        self._runtime.set_byte(self.pointer + rank, _OPEN)

    def __del__(self) -> None:
        pointer = getattr(self, "pointer", 0)
        if not pointer:
            return
        try:
            with torch.cuda.device(self._device):
                self._runtime.set_byte(pointer + self._rank, _CLOSED)
                self._runtime.close(pointer)
        except TransferFailed as error:
            _log.warning("a sender's GPU memory could not be unmapped: %s", error)


def _tensor_at(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(_Memory(pointer, nbytes), device=device)


def _device_of(uuid: str) -> torch.device | None:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if gpu_uuid(device) == uuid:
            return device
    return None


def _free(
    runtime: Runtime, pointer: int, flags: Tensor, device: torch.device, over: threading.Event
) -> None:
    """Freeing what a rank still has open is undefined; a rank that died leaves its flag set."""
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
