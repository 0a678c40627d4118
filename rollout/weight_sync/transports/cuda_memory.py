"""A GPU's memory by address, and by handles that other processes open.

``Runtime`` is all that this package asks of CUDA's own libraries. A handle travels as plain bytes
(a mark, the GPU's UUID, the size, a secret, CUDA's 64 bytes), never pickled, and the GPU is named
by its UUID, since ordinals differ between processes. torch's own handles of storages are not used:
their form is another in other versions of torch, and trainer and engine need not be of one.
"""

from __future__ import annotations

import ctypes
import hmac
import struct
from functools import cache, lru_cache
from typing import Any, NamedTuple
from uuid import UUID

import torch
from torch import Tensor

from rollout.errors import ConfigError, TransferFailed

FLAGS = 4096  # bytes: a page
_FORM = struct.Struct("<16s16sQ16s64s")  # mark, UUID, bytes, secret, CUDA's handle
_MAGIC = b"rollout-cuda-1\0\0"
_PEER_ACCESS = 1  # cudaIpcMemLazyEnablePeerAccess
# Of CUpointer_attribute: where an allocation begins, its bytes, and whether it has handles of IPC.
_ATTRIBUTES = (ctypes.c_int * 3)(11, 12, 10)
_Answers = ctypes.c_uint64 * len(_ATTRIBUTES)
_Places = ctypes.c_void_p * len(_ATTRIBUTES)


class Allocation(NamedTuple):
    """One of the driver's, around an address; ``shareable``: by handles of CUDA IPC."""

    start: int
    nbytes: int
    shareable: bool


class _Handle(ctypes.Structure):
    """``cudaIpcMemHandle_t``; it is passed by value."""

    _fields_ = (("reserved", ctypes.c_char * 64),)


@cache
def runtime() -> Runtime:
    """The one of this process; ``ConfigError`` where the library cannot be loaded."""
    return Runtime()


SharedAt = tuple[str, bytes]  # a sender's secret, and the handle of memory that it shares


@cache
def own_handles() -> dict[SharedAt, int]:
    """Where the memory lies that senders of this process share: CUDA opens no handle in the process
    that it is of.
    """
    return {}


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
        self._driver: ctypes.CDLL | None = None

    def enter(self) -> None:
        """Make this thread one of the current GPU's context, as the driver wants it before the
        runtime has been asked for anything.
        """
        self._call("cudaFree", ctypes.c_void_p(0))

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
        pointer, wanted = ctypes.c_void_p(), _Handle.from_buffer_copy(handle)
        self._call("cudaIpcOpenMemHandle", ctypes.byref(pointer), wanted, _PEER_ACCESS)
        return int(pointer.value or 0)

    def close(self, pointer: int) -> None:
        self._call("cudaIpcCloseMemHandle", ctypes.c_void_p(pointer))

    def around(self, pointer: int) -> Allocation:
        """The driver's allocation that ``pointer`` lies in, of this process or mapped into it.

        Memory of torch's expandable segments, and of CUDA's own pools, is not shareable.
        """
        found = _Answers()
        at = ctypes.addressof(found)
        # All at once: each question is a call of the driver.
        code = self._drivers().cuPointerGetAttributes(
            len(found), _ATTRIBUTES, _Places(at, at + 8, at + 16), ctypes.c_uint64(pointer)
        )
        start, size, legacy = found
        if code or not start:
            raise TransferFailed(f"the driver knows nothing of the address {pointer:#x} ({code})")
        return Allocation(start, size, bool(legacy & 0xFF))

    def _drivers(self) -> ctypes.CDLL:
        if self._driver is None:
            try:
                self._driver = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise TransferFailed(f"libcuda.so.1 cannot be loaded: {error}") from error
        return self._driver

    def set_byte(self, pointer: int, value: int, stream: int) -> None:
        """Write one byte after everything that was asked of ``stream`` before, and wait for that
        alone: what other streams have to do, such as steps, may last.
        """
        at = ctypes.c_void_p(stream)
        self._call("cudaMemsetAsync", ctypes.c_void_p(pointer), value, ctypes.c_size_t(1), at)
        self._call("cudaStreamSynchronize", at)

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


def pack_handle(uuid: str, nbytes: int, secret: str, handle: bytes) -> str:
    """What travels: hexadecimal digits of plain bytes."""
    if len(handle) != 64:
        raise ValueError(f"a handle of CUDA has 64 bytes, not {len(handle)}")
    return _FORM.pack(_MAGIC, UUID(uuid).bytes, nbytes, bytes.fromhex(secret), handle).hex()


def unpack_handle(text: str, nbytes: int, secret: str) -> tuple[str, bytes]:
    """(UUID, CUDA's handle) of memory of ``nbytes`` marked with ``secret``, else ``ValueError``."""
    uuid, size, handle = read_handle(text, secret)
    if size != nbytes:
        raise ValueError(f"it has {size} bytes, announced were {nbytes}")
    return uuid, handle


def read_handle(text: str, secret: str) -> tuple[str, int, bytes]:
    """(UUID, bytes of the memory, CUDA's handle) of what is marked with ``secret``, else
    ``ValueError``.
    """
    raw = bytes.fromhex(text)
    if len(raw) != _FORM.size:
        raise ValueError(f"a handle of {len(raw)} bytes, not {_FORM.size}")
    magic, uuid, size, marked, handle = _FORM.unpack(raw)
    if magic != _MAGIC or not hmac.compare_digest(marked, bytes.fromhex(secret)):
        raise ValueError("it is not marked as this update's")
    return _uuid_text(uuid), size, handle


@lru_cache(64)
def _uuid_text(uuid: bytes) -> str:
    return str(UUID(bytes=uuid))


def whole_pages(nbytes: int) -> int:
    return -(-nbytes // FLAGS) * FLAGS


class ForeignMemory:
    """Memory that torch may look at but does not own (the CUDA array interface).

    A tensor made of it keeps this object alive, and so what it ``keeps``.
    """

    def __init__(self, pointer: int, nbytes: int, keeps: object = None) -> None:
        self.pointer, self.keeps = pointer, keeps
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }


def tensor_at(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    return torch.as_tensor(ForeignMemory(pointer, nbytes), device=device)


def reached_gpus(device: torch.device) -> list[str]:
    """UUIDs of the GPUs whose memory this process can map and work on from ``device``."""
    if not gpu_uuid(device):
        return []
    gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    near = (x for x in gpus if x == device or torch.cuda.can_device_access_peer(device, x))
    return [uuid for uuid in map(gpu_uuid, near) if uuid]


def device_of(uuid: str) -> torch.device | None:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if gpu_uuid(device) == uuid:
            return device
    return None
