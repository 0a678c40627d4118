"""GPU memory that one process owns and others map for the length of an update, by both ends.

What is lent has a page of flags, one byte a rank, and two halves that buckets are packed into. It
is one allocation made by the CUDA runtime itself: memory of torch's caching allocator cannot be
shared once ``expandable_segments`` is on. It is freed when no rank has it open: a rank sets its
flag when it maps the memory and clears it after its last read; one that has never set it gets some
time to, in case it is about to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.distributed.native_thread import NativeThread
from rollout.errors import TransferFailed
from rollout.weight_sync.transports import cuda_memory
from rollout.weight_sync.transports.cuda_handles import GivenHandles
from rollout.weight_sync.transports.cuda_memory import (
    FLAGS,
    ForeignMemory,
    gpu_uuid,
    pack_handle,
    tensor_at,
)

OPEN_WAIT = 2.0  # seconds from mapping the memory to setting the flag

_OPEN, _CLOSED = 1, 2
_FREE_WAIT, _FREE_POLL = 60.0, 0.05  # seconds
_log = logging.getLogger(__name__)


class LentMemory:
    """The owner's end, on this process's current GPU: ``halves`` of ``half`` bytes, whole pages.

    ``handles``: those of the update, by which ranks of this process find it, too. ``num_flags``: of
    ranks that may map it. ``kept``: tensors of others, whose memory is to live as long as this.
    ``written_by``: the last of torch's works to write it, which an update that fails leaves behind.
    """

    written_by: Any = None

    def __init__(self, half: int, num_flags: int, handles: GivenHandles) -> None:
        self.num_flags, self.kept = num_flags, list[Tensor]()
        self._runtime = cuda_memory.runtime()
        self._device = device = torch.device("cuda", torch.cuda.current_device())
        size = FLAGS + 2 * half
        self._pointer = 0
        with torch.cuda.device(device):
            try:
                self._pointer = self._allocated(size)
                handle = handles.of_allocation(self._pointer)
            except TransferFailed:
                if self._pointer:
                    self._runtime.free(self._pointer)
                raise
        whole = self._whole = tensor_at(self._pointer, size, device)
        whole[:FLAGS].zero_()
        self.halves: tuple[Tensor, ...] = whole[FLAGS : FLAGS + half], whole[FLAGS + half :]
        self.handle = pack_handle(gpu_uuid(device), size, handles.secret, handle)
        torch.cuda.current_stream(device).synchronize()

    def _allocated(self, size: int) -> int:
        try:
            return self._runtime.allocate(size)
        except TransferFailed:
            torch.cuda.empty_cache()  # torch may hold what it does not use
            return self._runtime.allocate(size)

    @property
    def flags(self) -> Tensor:
        """uint8, one a rank."""
        return self._whole[: self.num_flags]

    def close(self) -> None:
        """Let go; the memory is freed in the background once no rank has it open. The last call."""
        flags, over = self.flags, threading.Event()  # the program ends, which frees it, too
        self.halves = ()
        del self._whole
        free = partial(
            _free, self._runtime, self._pointer, flags, self._device, over, self.written_by,
            self.kept,
        )  # fmt: skip
        NativeThread("free-ipc", free, over.set).start()


def released(flags: Tensor, waited: float = OPEN_WAIT) -> bool:
    """Whether no rank has the memory open, ``waited`` seconds after the end; uint8, one a rank."""
    if waited < OPEN_WAIT:
        return bool((flags == _CLOSED).all())
    return not bool((flags == _OPEN).any())


def until_unread(flags: Tensor, timeout: float) -> None:
    """After a failure: what belongs to the source is the trainer's again only when no rank reads it
    any more. A rank that died leaves its flag set, which bounds the wait.
    """
    deadline = time.monotonic() + timeout
    try:
        while bool((flags == _OPEN).any()):
            if time.monotonic() > deadline:
                _log.warning("a rank has not said that it stopped reading this process's tensors")
                return
            time.sleep(_FREE_POLL / 10)
    except RuntimeError as error:  # a GPU that fails: the update's own error says more
        _log.warning("who reads this process's tensors cannot be seen: %s", error)


def _free(
    runtime: cuda_memory.Runtime,
    pointer: int,
    flags: Tensor,
    device: torch.device,
    over: threading.Event,
    written_by: Any,
    kept: Sequence[Tensor],
) -> None:
    """Freeing what a rank still has open is undefined; a rank that died leaves its flag set.
    ``kept``: tensors of the source, whose memory lives until then, too.
    """
    with torch.cuda.device(device):
        if wait_released(flags, over, written_by):
            runtime.free(pointer)


def wait_released(flags: Tensor, over: threading.Event, written_by: Any = None) -> bool:
    """Until no rank has the memory open and its last work is over: CUDA would wait for that, and
    other threads for CUDA. False when it has to be left as it is.
    """
    started = time.monotonic()
    while _written(written_by) or not released(flags, time.monotonic() - started):
        if time.monotonic() - started > _FREE_WAIT:
            _log.warning("GPU memory shared with a rank was never released; it stays allocated")
            return False
        if over.wait(_FREE_POLL):
            return False
    return not over.wait(_FREE_POLL)  # from its flag to its unmapping


def _written(by: Any) -> bool:
    return by is not None and not by.is_completed()


class Mapped:
    """Memory of a sender: of another process by its handles, of this one as it lies there.

    Unmapped when the last view of it is gone. ``reads``: the stream of what reads it.
    """

    def __init__(self, secret: str, owner: torch.device, reads: Any) -> None:
        self._opened: list[int] = []
        self._secret, self._owner, self._reads = secret, owner, reads
        self._runtime = cuda_memory.runtime()

    def map(self, nbytes: int, handle: bytes) -> Tensor:
        """uint8 [bytes]."""
        with torch.cuda.device(self._owner):
            return self._view(self._start(handle), nbytes)

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


class MappedRegions(Mapped):
    """Allocations of a sender's own, as long as the update or a view of one of them lasts.

    All of one bucket together: what is asked of CUDA for hundreds of them is asked once, where it
    can be. ``memory``: that with the flags, which says that this process is reading until these are
    gone.
    """

    def __init__(self, secret: str, owner: torch.device, reads: Any, memory: Tensor) -> None:
        super().__init__(secret, owner, reads)
        self._memory = memory

    def map_all(self, wanted: Sequence[tuple[int, bytes]]) -> list[Tensor]:
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


class MappedLent(Mapped):
    """The memory with the flags, of which byte ``flag`` says whether this process has it open."""

    _at = 0  # where that byte lies, once it is set

    def __init__(self, secret: str, owner: torch.device, reads: Any, flag: int) -> None:
        super().__init__(secret, owner, reads)
        self._flag, self._writes = flag, torch.cuda.current_stream(owner).cuda_stream

    def map(self, nbytes: int, handle: bytes) -> Tensor:
        with torch.cuda.device(self._owner):
            start = self._start(handle)
            self._at = start + self._flag
            self._runtime.set_byte(self._at, _OPEN, self._writes)
            return self._view(start, nbytes)

    def _leave(self) -> None:
        if self._at:
            self._runtime.set_byte(self._at, _CLOSED, self._writes)
