"""The wire format between our own processes: a JSON header and raw tensor bytes, no pickle.

A frame is ``u32 header length | u64 payload length | header | payload``, little-endian. The header
is a JSON object; each tensor of the frame is described under ``"tensors"`` as
``{key: [dtype name, shape, offset, nbytes]}`` and lies in the payload at that offset. Lengths are
bounded and descriptions are checked before any memory is touched.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping
from math import prod
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from rollout.errors import TransferFailed

MAX_HEADER = 256 << 20
MAX_PAYLOAD = 16 << 30  # a bucket is at most 8 GiB
_AT_ONCE = 512  # buffers of one call; systems take 1024 at most
_SKIPPED = 1 << 16  # bytes at once, of what there is no memory for
_PREFIX = struct.Struct("<IQ")
# RuntimeError: nested too deep, or sizes that no tensor can have.
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RuntimeError)

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OF_NUMPY = frozenset((torch.float32, torch.float64, torch.int32, torch.int64))


def dtype_name(dtype: torch.dtype) -> str:
    try:
        return _NAMES[dtype]
    except KeyError:
        raise TransferFailed(f"dtype {dtype} has no wire form") from None


def dtype_from_name(name: str) -> torch.dtype:
    try:
        return DTYPES[name]
    except KeyError:
        raise TransferFailed(
            f"unknown dtype {name!r} on the wire; known here, with torch {torch.__version__}: "
            f"{', '.join(DTYPES)}"
        ) from None


def flat_bytes(tensor: Tensor) -> Tensor:
    """What a tensor holds, as uint8 [nbytes]; its own memory where it is contiguous."""
    tensor = tensor.detach().contiguous()
    # One element is contiguous whatever its stride, and ``view`` wants a stride of 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, without a copy."""
    if not tensor.numel():
        return memoryview(b"")
    if tensor.dtype in _OF_NUMPY and tensor.is_contiguous() and not tensor.requires_grad:
        return memoryview(tensor.numpy().ravel().data).cast("B")  # steps have many short ones
    return memoryview(flat_bytes(tensor).numpy().data).cast("B")


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> list[Any]:
    """The buffers of one frame, to be sent one after the other."""
    described: dict[str, list[Any]] = {}
    parts: list[Any] = []
    offset = 0
    for key, tensor in (tensors or {}).items():
        data = tensor_bytes(tensor)
        described[key] = [dtype_name(tensor.dtype), list(tensor.shape), offset, data.nbytes]
        if data.nbytes:
            parts.append(data)
        offset += data.nbytes
    head = json.dumps({**header, "tensors": described}, separators=(",", ":")).encode()
    return [_PREFIX.pack(len(head), offset), head, *parts]


Frame = tuple[dict[str, Any], dict[str, Tensor]]
Reply = Frame  # what a rank answers a call with


def decode(head: bytes | bytearray | memoryview, payload: bytearray) -> Frame:
    """The header and the tensors (views of ``payload``) of one frame; raises TransferFailed."""
    try:
        header, described = _header(head)
        tensors = {key: view_at(payload, *row) for key, row in described.items()}
    except _MALFORMED as error:
        raise TransferFailed(f"malformed frame: {error}") from error
    return header, tensors


def _header(head: bytes | bytearray | memoryview) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        header = json.loads(bytes(head))
        return header, header.pop("tensors")
    except _MALFORMED as error:
        raise TransferFailed(f"malformed frame: {error}") from error


def view_at(
    payload: bytearray | mmap, name: str, shape: list[int], offset: int, nbytes: int
) -> Tensor:
    """The tensor that a row describes, as it lies in ``payload``; ``ValueError`` if none can."""
    dtype = dtype_from_name(name)
    if min(shape, default=0) < 0 or prod(shape) * dtype.itemsize != nbytes:
        raise ValueError(f"{name} {shape} is not {nbytes} bytes")
    if offset < 0 or offset + nbytes > len(payload):
        raise ValueError(f"tensor at {offset}+{nbytes} lies outside {len(payload)} bytes")
    if nbytes == 0:
        return torch.empty(shape, dtype=dtype)
    if dtype in _OF_NUMPY and not offset % dtype.itemsize:
        count = nbytes // dtype.itemsize
        flat = torch.frombuffer(payload, dtype=dtype, count=count, offset=offset)
        return flat if len(shape) == 1 else flat.reshape(shape)
    raw = torch.frombuffer(payload, dtype=torch.uint8, count=nbytes, offset=offset)
    if offset % dtype.itemsize:  # a view of another dtype must be aligned
        raw = raw.clone()
    return raw.view(dtype).reshape(shape)


def send_frame(
    sock: socket.socket, header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write one frame; the caller holds the socket's send lock."""
    parts = [memoryview(part).cast("B") for part in encode(header, tensors)]
    sent = sock.sendmsg(parts[:_AT_ONCE])  # all of it, mostly: the peer wakes up once
    for part in parts:
        if sent < len(part):
            sock.sendall(part[sent:])
        sent = max(0, sent - len(part))


def recv_frame(sock: socket.socket) -> Frame | None:
    """Read one frame; None when the peer closed before its first byte."""
    prefix = bytearray(_PREFIX.size)
    if not _fill(sock, prefix, may_end=True):
        return None
    head_size, payload_size = _PREFIX.unpack(prefix)
    if head_size > MAX_HEADER or payload_size > MAX_PAYLOAD:
        raise TransferFailed(f"frame of {head_size} + {payload_size} bytes is over the limit")
    head = bytearray(head_size)
    _fill(sock, head)
    try:
        payload = bytearray(payload_size)
    except MemoryError:
        _skip(sock, payload_size)
        raise LostPayloadError(_header(head)[0], payload_size) from None
    _fill(sock, payload)
    return decode(head, payload)


def frame_at(memory: memoryview, at: int) -> Frame:
    """A copy of the frame whose bytes begin there."""
    head_size, payload_size = _PREFIX.unpack_from(memory, at)
    head_at = at + _PREFIX.size
    end = head_at + head_size + payload_size
    if end > len(memory):
        raise TransferFailed(f"frame of {head_size} + {payload_size} bytes is over its memory")
    return decode(
        memory[head_at : head_at + head_size], bytearray(memory[end - payload_size : end])
    )


class LostPayloadError(Exception):
    """There was no memory for a frame's tensors; its ``header``, and the stream, are whole."""

    def __init__(self, header: dict[str, Any], nbytes: int) -> None:
        super().__init__(f"no memory for {nbytes} bytes that came in")
        self.header = header


def _skip(sock: socket.socket, size: int) -> None:
    room = memoryview(bytearray(min(size, _SKIPPED)))
    while size:
        part = room[: min(size, len(room))]
        _fill(sock, part)
        size -= len(part)


def _fill(sock: socket.socket, into: bytearray | memoryview, may_end: bool = False) -> bool:
    view = memoryview(into)
    got = 0
    while got < len(into):
        count = sock.recv_into(view[got:])
        if count == 0:
            if may_end and got == 0:
                return False
            raise TransferFailed(f"peer closed after {got} of {len(into)} bytes")
        got += count
    return True
