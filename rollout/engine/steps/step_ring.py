"""Steps, and what ranks reply to them, through memory that the engine and its ranks map.

    engine                 anonymous shared memory                      rank r
    call("step") ------->  calls: slots that all ranks read  -------->  main thread
    Future.result() <----  replies of rank r: slots          <--------  main thread, or the replies'

A slot holds one frame of ``wire.frames``. No thread stands between: the rank's main thread takes
its calls itself, and who waits for a step's future reads the replies. Each waits at a bell of its
own (``kernels/native/bell.c``): it looks for some microseconds, then sleeps without costing a core.

Everything else goes through the rank's socket, as does a frame that finds no room here, an error,
and all of it where there is no such memory (ranks on other hosts, not Linux, no compiler). Calls of
a rank's main thread are numbered (``turn``), so both ways make one order.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from rollout.kernels import native
from rollout.wire.frames import Frame, Reply, encode, frame_at

CALL_BYTES, REPLY_BYTES = 512 << 10, 128 << 10  # of a slot
SLOTS = 4  # two steps are under way at most
MAX_RANKS = 64

_SPIN = 2_000_000  # ns in which a waiting thread looks, and lets others have its core
_LOOK = 0.25  # seconds after which a waiting thread looks at signals and its deadline
_HEADER = 16 << 10  # bytes kept for a frame's header
_LINE = 64  # bytes, so that no two processes write into the same one
_SLEEPERS_END = 8  # bytes of a bell, at the beginning of a line; the line's counters follow
_TURN = struct.Struct("<Q")

_log = logging.getLogger(__name__)


class StepRing:
    """The engine's end. ``put`` is called in one order; the rest is thread-safe.

    ``fd``: for the ranks to inherit, or to open, until ``begin``. Nothing goes this way before
    ``begin`` has found that every rank has mapped it.
    """

    def __init__(self, size: int, fd: int, spin: int) -> None:
        self.fd: int | None = fd
        self._memory: _Memory | None = _Memory(fd, size)
        self._spin, self._size = spin, size
        self._written, self._taken = 0, [0] * size
        self._lock = threading.Lock()
        self._last: dict[str, Tensor] = {}  # of the last call
        self.in_use = False
        self._memory.set(_Lines.SPIN, spin)

    @classmethod
    def make(cls, size: int, busy_cores: int) -> StepRing | None:
        """None where there is no such memory.

        ``busy_cores``: what the ranks compute with: where no other core is left, nobody spins.
        """
        if size > MAX_RANKS or not hasattr(os, "memfd_create") or native.library() is None:
            return None
        spin = _SPIN if len(os.sched_getaffinity(0)) > busy_cores else 0
        fd = -1
        try:
            fd = os.memfd_create("rollout-steps", os.MFD_CLOEXEC)
            os.posix_fallocate(fd, 0, _length(size))  # a shortage is an error here, no signal later
            return cls(size, fd, spin)
        except (OSError, ValueError) as error:
            _log.warning("steps go through sockets: %s", error)
            if fd >= 0:
                os.close(fd)
            return None

    def begin(self) -> None:
        """The ranks have started: use it if all have it, and let go of the descriptor."""
        if (memory := self._memory) is not None:
            ranks = range(self._size)
            self.in_use = all(memory.get(_Lines.joined(rank)) for rank in ranks)
            memory.set(_Lines.IN_USE, self.in_use)
        self._close_descriptor()

    def close(self) -> None:
        """Let go of the memory; what waits in it has been resolved before."""
        self.in_use = False
        self.wake()
        self._memory, self._last = None, {}  # unmapped when the last thread has left it
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        fd, self.fd = self.fd, None
        if fd is not None:
            os.close(fd)

    def takes(self, tensors: Mapping[str, Tensor] | None) -> bool:
        """Whether a call with ``tensors`` need not have them elsewhere."""
        nbytes = sum(tensor.nbytes for tensor in (tensors or {}).values())
        return self.in_use and nbytes <= CALL_BYTES - _HEADER

    def put(self, turn: int, header: dict[str, Any], tensors: Mapping[str, Tensor]) -> bool:
        """Hand one frame to all ranks; False where it is too long, or no slot is free.

        Of tensors that the call before had, too, the very same ones, ranks are told the names.
        """
        memory = self._memory
        if memory is None or not self.in_use:
            return False
        read = [memory.get(_Lines.read(rank)) for rank in range(self._size)]
        if any(_since(self._written, count) >= SLOTS for count in read):
            return False
        last = self._last
        again = [name for name, tensor in tensors.items() if last.get(name) is tensor]
        if again:
            new = {name: tensor for name, tensor in tensors.items() if last.get(name) is not tensor}
            buffers = encode({**header, "again": again}, new)
        else:
            buffers = encode(header, tensors)
        if _TURN.size + sum(map(len, buffers)) > CALL_BYTES:
            return False
        memory.fill(memory.call_slot(self._written), turn, buffers)
        self._written, self._last = self._written + 1, dict(tensors)
        memory.set(_Lines.WRITTEN, self._written)
        for rank in range(self._size):
            memory.ring(_Lines.of_rank(rank))
        return True

    def wake(self) -> None:
        """Have everybody who waits look whether it is over."""
        if (memory := self._memory) is not None:
            memory.ring(0)

    def wait_until(
        self,
        done: Callable[[], bool],
        timeout: float | None,
        resolve: Callable[[int, Frame], None],
    ) -> None:
        """Hand replies, with their rank, to ``resolve`` until ``done`` or the ``timeout``."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (memory := self._memory) is not None:
            rung = memory.get(0)
            with self._lock:
                for rank, frame in self._replies(memory):
                    resolve(rank, frame)
            if done():
                return
            left = _LOOK if deadline is None else min(_LOOK, deadline - time.monotonic())
            if left <= 0:
                return
            memory.wait(0, rung, self._spin, left)

    def _replies(self, memory: _Memory) -> Iterator[tuple[int, Frame]]:
        for rank in range(self._size):
            while _since(memory.get(_Lines.replied(rank)), self._taken[rank]):
                frame = memory.frame(memory.reply_slot(rank, self._taken[rank]))
                self._taken[rank] += 1
                memory.set(_Lines.taken(self._size, rank), self._taken[rank])
                yield rank, frame


class RankSteps:
    """A rank's end: ``take`` and ``wait`` of its main thread, ``reply`` of one thread at once."""

    def __init__(self, fd: int, rank: int, size: int) -> None:
        self._memory = _Memory(fd, size)
        self._rank, self._size = rank, size
        self._bell = _Lines.of_rank(rank)
        self._read = self._replied = 0
        self._waited: int | None = None  # what the bell was at as the last wait began
        self._last: dict[str, Tensor] = {}  # of the last call
        self._spin = self._memory.get(_Lines.SPIN)
        self._memory.set(_Lines.joined(rank), 1)

    @classmethod
    def join(cls, fd: int | None, rank: int, size: int) -> RankSteps | None:
        """Map what is behind ``fd``, which is closed here; None where that cannot be."""
        if fd is None:
            return None
        try:
            return cls(fd, rank, size) if native.library() is not None else None
        except (OSError, ValueError) as error:
            _log.warning("steps come through the socket: %s", error)
            return None
        finally:
            os.close(fd)

    @property
    def rung(self) -> int:
        """What ``wait`` is to be told, read before looking for a call."""
        return self._memory.get(self._bell)

    def take(self, turn: int) -> Frame | None:
        """The call whose turn it is, if it is here."""
        memory = self._memory
        if not _since(memory.get(_Lines.WRITTEN), self._read):
            return None
        slot = memory.call_slot(self._read)
        if memory.turn(slot) != turn:
            return None  # one comes before it, through the socket
        header, tensors = memory.frame(slot)
        self._read += 1
        memory.set(_Lines.read(self._rank), self._read)
        tensors.update({name: self._last[name] for name in header.get("again", ())})
        self._last = dict(tensors)
        return header, tensors

    def wait(self, rung: int) -> None:
        """Until the bell has been rung since; or a while. Who is idle spins only once."""
        spin = 0 if rung == self._waited else self._spin
        self._memory.wait(self._bell, rung, spin, _LOOK)
        self._waited = rung

    def wake(self) -> None:
        """End a ``wait``; called from any thread."""
        self._memory.ring(self._bell)

    def reply(self, buffers: list[Any]) -> bool:
        """Hand one frame to the engine; False where it is too long, no slot is free, or the engine
        does not look here.
        """
        memory = self._memory
        if not memory.get(_Lines.IN_USE):
            return False
        taken = memory.get(_Lines.taken(self._size, self._rank))
        too_long = _TURN.size + sum(map(len, buffers)) > REPLY_BYTES
        if too_long or _since(self._replied, taken) >= SLOTS:
            return False
        memory.fill(memory.reply_slot(self._rank, self._replied), 0, buffers)
        self._replied += 1
        memory.set(_Lines.replied(self._rank), self._replied)
        memory.ring(0)
        return True


class StepFuture(Future[Reply]):
    """A step's reply: who waits for it reads it, and those of other ranks, from the memory.

    ``concurrent.futures.wait`` does not: ask each for its ``exception``.
    """

    def __init__(self, read: Callable[[Callable[[], bool], float | None], None]) -> None:
        super().__init__()
        self._read = read

    def result(self, timeout: float | None = None) -> Reply:
        if not self.done():
            self._read(self.done, timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._read(self.done, timeout)
        return super().exception(0)


class _Lines:
    """Where counters lie, in bytes: the engine's line, one of each rank, one for each by it."""

    WRITTEN, SPIN, IN_USE = _SLEEPERS_END, _SLEEPERS_END + 4, _SLEEPERS_END + 8

    @staticmethod
    def of_rank(rank: int) -> int:
        return (1 + rank) * _LINE

    @staticmethod
    def joined(rank: int) -> int:
        return (1 + rank) * _LINE + _SLEEPERS_END

    @staticmethod
    def read(rank: int) -> int:
        return (1 + rank) * _LINE + _SLEEPERS_END + 4

    @staticmethod
    def replied(rank: int) -> int:
        return (1 + rank) * _LINE + _SLEEPERS_END + 8

    @staticmethod
    def taken(size: int, rank: int) -> int:
        return (1 + size + rank) * _LINE


class _Memory:
    """The mapping, zero at first: lines of counters, slots of calls, slots of each rank's replies.

    Counters are 32 bits, and wrap.
    """

    def __init__(self, fd: int, size: int) -> None:
        mapped = mmap.mmap(fd, _length(size))
        self._bytes = memoryview(mapped)
        self._base = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr()
        self._calls = _head(size)
        self._replies = self._calls + SLOTS * CALL_BYTES
        self._get, self._set = native.entry("counter_read"), native.entry("counter_write")
        self._ring, self._wait = native.entry("bell_ring"), native.entry("bell_wait")

    def get(self, at: int) -> int:
        return int(self._get(self._base + at))

    def set(self, at: int, value: int) -> None:
        self._set(self._base + at, value)

    def ring(self, at: int) -> None:
        self._ring(self._base + at)

    def wait(self, at: int, rung: int, spin: int, seconds: float) -> None:
        self._wait(self._base + at, rung, spin, int(seconds * 1e9))

    def call_slot(self, number: int) -> int:
        return self._calls + number % SLOTS * CALL_BYTES

    def reply_slot(self, rank: int, number: int) -> int:
        return self._replies + (rank * SLOTS + number % SLOTS) * REPLY_BYTES

    def fill(self, at: int, turn: int, buffers: list[Any]) -> None:
        _TURN.pack_into(self._bytes, at, turn)
        at += _TURN.size
        for buffer in buffers:
            self._bytes[at : at + len(buffer)] = buffer
            at += len(buffer)

    def turn(self, at: int) -> int:
        turn: int = _TURN.unpack_from(self._bytes, at)[0]
        return turn

    def frame(self, at: int) -> Frame:
        return frame_at(self._bytes, at + _TURN.size)


def _since(later: int, earlier: int) -> int:
    """How far one counter is behind another."""
    return (later - earlier) & 0xFFFFFFFF


def _head(size: int) -> int:
    return -(-(1 + 2 * size) * _LINE // mmap.PAGESIZE) * mmap.PAGESIZE


def _length(size: int) -> int:
    return _head(size) + SLOTS * (CALL_BYTES + size * REPLY_BYTES)
