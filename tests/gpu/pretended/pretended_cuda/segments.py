"""Memory of the card that other processes can map: what a tensor that was moved there lies in.

A segment is an anonymous file, mapped. Its handle is the file's name below /proc, so that it can be
opened as long as its process lives; who has mapped it keeps it, as on a card. What the card's own
operations make lies in no segment, and stands for memory that cannot be shared.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from bisect import bisect_right, insort
from typing import Any

import torch
from torch import Tensor

AHEAD = 512  # bytes before the tensor: no tensor begins where its allocation does

_found: dict[int, tuple[int, int]] = {}  # start -> (bytes, descriptor)
_starts: list[int] = []


def in_segment(plain: Tensor) -> Tensor:
    """A copy of ``plain``, contiguous, in a segment of its own."""
    size = AHEAD + max(plain.nbytes, 1)
    descriptor = os.memfd_create("segment")
    os.truncate(descriptor, size)
    memory: Any = (ctypes.c_uint8 * size).from_buffer(mmap.mmap(descriptor, size))
    start = ctypes.addressof(memory)
    _found[start] = size, descriptor
    insort(_starts, start)
    weakref.finalize(memory, _forget, start, descriptor)
    made = torch.frombuffer(memory, dtype=torch.uint8)[AHEAD : AHEAD + plain.nbytes]
    return made.view(plain.dtype).view(plain.shape).copy_(plain)


def segment_at(pointer: int) -> Any:
    """The segment around an address, or None."""
    from rollout.weight_sync.transports.cuda_memory import Allocation

    at = bisect_right(_starts, pointer)
    if not at:
        return None
    start = _starts[at - 1]
    size, _ = _found[start]
    return Allocation(start, size, True) if pointer < start + size else None


def name_of_segment(start: int) -> str | None:
    found = _found.get(start)
    return None if found is None else f"/proc/{os.getpid()}/fd/{found[1]}"


def _forget(start: int, descriptor: int) -> None:
    del _found[start]
    _starts.remove(start)
    os.close(descriptor)
