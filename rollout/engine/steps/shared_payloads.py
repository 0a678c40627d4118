"""Large tensors of a call, put once into memory that all ranks share instead of into each socket.

The engine's process owns a run of anonymous memory whose descriptor every rank inherits. A call's
tensors lie in it from the call until the last rank's reply; ranks see them as views, without a
copy. What comes from a socket may be received into a ``buffer`` of it, and is not copied at all.
Where there is no such memory (not Linux), tensors travel in the frames.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.wire.frames import dtype_name, view_at

MIN_SHARED = 1 << 17  # bytes; what is shorter is as fast through a socket
MAX_BUFFER_BYTES = 2 << 30  # of all buffers: of what a peer has announced, not yet sent
_IDLE = 1.0  # seconds without a tensor after which the memory is given back

Rows = dict[str, list[Any]]  # by tensor: dtype name, shape, offset, nbytes

_log = logging.getLogger(__name__)


class PayloadMemory:
    """The engine's end. Thread-safe; ``fd`` is None where there is no memory to share."""

    def __init__(self) -> None:
        self.fd: int | None = None
        self._mapped: mmap.mmap | None = None
        self._used: dict[int, int] = {}  # start -> end of what ranks may still read
        self._buffers: dict[int, int] = {}  # address of a tensor made by ``buffer`` -> its start
        self._left: list[tuple[int, int]] = []  # the same, of those that nobody has any more
        self._lock = threading.Lock()
        self._last = 0.0
        self._timer: threading.Timer | None = None
        if hasattr(os, "memfd_create"):
            try:
                self.fd = os.memfd_create("rollout-payloads", os.MFD_CLOEXEC)
            except OSError as error:
                _log.warning("the ranks share no memory for weights: %s", error)

    def buffer(self, nbytes: int) -> Tensor | None:
        """Memory for a payload to come, uint8 [nbytes]; ``place`` will not copy it.

        Taken until nobody has the tensor. None where it is short, where buffers take
        ``MAX_BUFFER_BYTES`` already, or no memory was found.
        """
        found = self._reserve(nbytes, MAX_BUFFER_BYTES)
        if found is None:
            return None
        memory, start = found
        held = np.frombuffer(memory, np.uint8, nbytes, start)
        buffer = torch.from_numpy(held)
        with self._lock:
            self._buffers[buffer.data_ptr()] = start
        # Called from any thread at any time, also one that holds the lock: it only takes a note.
        gone = weakref.finalize(held, self._left.append, (buffer.data_ptr(), start))
        gone.atexit = False
        return buffer

    def place(self, tensors: Mapping[str, Tensor]) -> tuple[Rows, int | None] | None:
        """Copy ``tensors`` in: what a rank has to know of them, and the place to ``free``.

        There is none to free for a tensor that lies in a ``buffer``: it has to be kept meanwhile.
        None where they are short, or no memory was found.
        """
        size = sum(_pages(tensor.nbytes) for tensor in tensors.values())
        if size < MIN_SHARED:  # at once: steps come by here, and the lock may be held for long
            return None
        if (lying := self._lying(tensors)) is not None:
            return lying, None
        found = self._reserve(size)
        if found is None:
            return None
        memory, start = found
        try:
            rows: Rows = {}
            at = start
            for key, tensor in tensors.items():
                rows[key] = [dtype_name(tensor.dtype), list(tensor.shape), at, tensor.nbytes]
                view_at(memory, *rows[key]).copy_(tensor)
                at += _pages(tensor.nbytes)
        except BaseException:
            self.free(start)
            raise
        return rows, start

    def free_after(
        self, futures: list[Future[Any]], place: int | None, tensors: Mapping[str, Tensor]
    ) -> None:
        """Free a place, or let go of tensors in buffers, when all ``futures`` are done."""
        left, lock, kept = [len(futures)], threading.Lock(), [tensors]

        def done(_: Future[Any]) -> None:
            with lock:
                left[0] -= 1
                last = not left[0]
            if last:
                kept.clear()
                if place is not None:
                    self.free(place)

        for future in futures:
            future.add_done_callback(done)

    def free(self, place: int) -> None:
        with self._lock:
            self._used.pop(place, None)
            self._last = time.monotonic()

    def _free_left(self) -> None:
        """With the lock: the buffers that nobody has any more."""
        while self._left:
            address, start = self._left.pop()
            if self._buffers.get(address) == start:  # else another one lies there by now
                del self._buffers[address]
            self._used.pop(start, None)
            self._last = time.monotonic()

    def _trim_in(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._trim)
        self._timer.daemon = True
        self._timer.start()

    def _trim(self) -> None:
        """Give the memory back if nothing has lain in it for a while, else look again later."""
        with self._lock:
            self._timer = None
            self._free_left()
            if self.fd is None:
                return
            left = self._last + _IDLE - time.monotonic()
            if self._used or left > 0:
                self._trim_in(_IDLE if self._used else left)
                return
            self._mapped = None
            os.ftruncate(self.fd, 0)

    def close(self) -> None:
        with self._lock:
            fd, self.fd, self._mapped = self.fd, None, None
            if self._timer is not None:
                self._timer.cancel()
        if fd is not None:
            os.close(fd)

    def _lying(self, tensors: Mapping[str, Tensor]) -> Rows | None:
        """The rows of tensors that are buffers, from their first byte on; None if one is not."""
        with self._lock:
            self._free_left()
        rows: Rows = {}
        for key, tensor in tensors.items():
            start = self._buffers.get(tensor.data_ptr())
            if start is None or not tensor.is_contiguous():
                return None
            rows[key] = [dtype_name(tensor.dtype), list(tensor.shape), start, tensor.nbytes]
        return rows

    def _reserve(self, size: int, most: int | None = None) -> tuple[mmap.mmap, int] | None:
        """Memory, and where in it ``size`` bytes are taken; ``most``: of all buffers then."""
        if self.fd is None or size < MIN_SHARED:
            return None
        with self._lock:
            if self.fd is None:
                return None
            self._free_left()
            buffers = sum(self._used[start] - start for start in self._buffers.values())
            if most is not None and buffers + size > most:
                return None
            start = self._take(size)
            try:
                memory = self._memory(start, size)
            except (OSError, ValueError, MemoryError) as error:
                _log.warning("weights go through the sockets: %s", error)
                del self._used[start]
                return None
            if self._timer is None:
                self._trim_in(_IDLE)
            return memory, start

    def _take(self, size: int) -> int:
        """The first gap of ``size`` bytes, taken."""
        size, start = _pages(size), 0
        for first, end in sorted(self._used.items()):
            if first - start >= size:
                break
            start = max(start, end)
        self._used[start] = start + size
        return start

    def _memory(self, start: int, size: int) -> mmap.mmap:
        """Mapped, with pages of its own from ``start`` on: a shortage is an error here, not a
        signal when they are written."""
        assert self.fd is not None
        os.posix_fallocate(self.fd, start, size)
        end = start + size
        if self._mapped is None or len(self._mapped) < end:
            self._mapped = mmap.mmap(self.fd, end)
        return self._mapped


class PayloadViews:
    """A rank's end: the tensors of a frame's ``shared`` rows, as they lie in the memory."""

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        self._mapped: mmap.mmap | None = None

    def views(self, rows: Mapping[str, Any]) -> dict[str, Tensor]:
        """Valid until the call's reply."""
        if not rows:
            return {}
        if self._fd is None:
            raise TransferFailed("tensors lie in shared memory that this rank has not got")
        end = max(offset + nbytes for _, _, offset, nbytes in rows.values())
        if self._mapped is None or len(self._mapped) < end:
            self._mapped = mmap.mmap(self._fd, os.fstat(self._fd).st_size)
        return {key: view_at(self._mapped, *row) for key, row in rows.items()}

    def close(self) -> None:
        """Close the descriptor; views that are still about stay valid."""
        fd, self._fd, self._mapped = self._fd, None, None
        if fd is not None:
            os.close(fd)


def _pages(nbytes: int) -> int:
    """``nbytes`` in whole pages."""
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
