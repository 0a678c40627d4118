"""The engine's end of the process that follows grammars, and its deadlines."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from torch import Tensor

from rollout.distributed.child_environment import child_environment
from rollout.distributed.life_lines import closed_in_forks
from rollout.errors import EngineError, TransferFailed, from_wire
from rollout.wire.frames import recv_frame, send_frame

COMPILE_LIMIT = 10.0  # seconds of processor time for one grammar
FOLLOW_LIMIT = 3.0  # seconds of processor time for one row of a step
HANG_LIMIT = 3.0  # seconds in which a process that was asked something does nothing at all
_WATCH_EVERY = 0.1

PROGRESS = struct.Struct("<qq")  # the row under way, and the thread that follows
NO_ROW = -1

# What became of a row: a mask, nothing may follow, no such text, its time is used up, no token is
# what has to follow.
FOLLOWS, DONE, REFUSED, SLOW, STUCK = range(5)


def mask_width(vocab_size: int) -> int:
    """How many int32 hold a bit for each token."""
    return (vocab_size + 31) // 32


class Lost(Enum):
    """Why a process is of no more use."""

    ENDED = "its process ended"
    HUNG = "its process did not run"
    SLOW_ROW = "too slow to follow"
    SLOW_COMPILE = "too slow to compile"
    CLOSED = "closed"


class ProcessLostError(Exception):
    """``row`` was under way, and ``compiling`` says whether a grammar was, too."""

    def __init__(self, why: Lost, row: int, compiling: bool) -> None:
        super().__init__(why.value)
        self.why, self.row, self.compiling = why, row, compiling


class GrammarProcess:
    """One process; ``compile`` and ``masks`` may be called in two threads, each by one at a time.

    Limits are of processor time, so that nobody pays for a busy machine; only of one that does
    nothing the time on the wall counts. After a ``ProcessLostError`` it is killed, and every later
    one has the reason and the row of the first.
    """

    def __init__(self, settings: Mapping[str, Any], timeout: float) -> None:
        """Started and ready; ``EngineError`` where it is not within ``timeout`` seconds."""
        self.known: OrderedDict[str, None] = OrderedDict()  # grammars, the newest last
        self.told: dict[int, int] = {}  # sequence -> how many of its tokens it knows
        self._lost: ProcessLostError | None = None
        self._loss_lock = threading.Lock()
        self._compiling = False
        self._asking: set[socket.socket] = set()
        self._calls, theirs = socket.socketpair()
        self._steps, mask_end = socket.socketpair()
        for ours in (self._calls, self._steps):
            closed_in_forks(ours)
        progress = os.memfd_create("rollout-grammar-progress")
        os.truncate(progress, mmap.PAGESIZE)
        self._progress = mmap.mmap(progress, mmap.PAGESIZE)
        PROGRESS.pack_into(self._progress, 0, NO_ROW, 0)
        passed = (theirs.fileno(), mask_end.fileno(), progress)
        names = ("--compile-fd", "--mask-fd", "--progress-fd")
        flags = [text for name, fd in zip(names, passed, strict=True) for text in (name, str(fd))]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "rollout.engine.structured", *flags],
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=child_environment({"OMP_NUM_THREADS": "1"}, {}),
                process_group=0,
            )
        finally:
            theirs.close()
            mask_end.close()
            os.close(progress)
        try:
            self._ask(self._calls, settings, _WallLimit(timeout))
        except ProcessLostError as error:
            raise EngineError(
                "the process that follows grammars did not start; its own words are on stderr"
            ) from error

    def compile(self, spec: Mapping[str, Any]) -> None:
        """Raises ``InvalidRequest``, or ``ProcessLostError``."""
        pid = self._process.pid
        self._compiling = True
        try:
            limit = _ProcessorLimit(pid, pid, COMPILE_LIMIT, Lost.SLOW_COMPILE)
            reply, _ = self._ask(self._calls, {"spec": spec}, limit)
        finally:
            self._compiling = False
        if "error" in reply:
            raise from_wire(reply["error"])

    def masks(
        self, rows: Sequence[Mapping[str, Any]], forget: Sequence[int]
    ) -> tuple[list[int], Tensor]:
        """States of the rows, and int32 [rows, mask_width]; raises ``ProcessLostError``."""
        _, thread = PROGRESS.unpack_from(self._progress)
        limit = _ProcessorLimit(self._process.pid, thread, FOLLOW_LIMIT, Lost.SLOW_ROW, self._row)
        reply, tensors = self._ask(self._steps, {"rows": rows, "forget": forget}, limit)
        return reply["states"], tensors["masks"]

    @property
    def alive(self) -> bool:
        return self._lost is None and self._process.poll() is None

    def close(self) -> None:
        """End it; from any thread. Whoever waits for an answer gets ``ProcessLostError``."""
        self._lose(Lost.CLOSED)

    def _row(self) -> int:
        return int(PROGRESS.unpack_from(self._progress)[0])

    def _lose(self, why: Lost) -> ProcessLostError:
        """Kill it, unless that is done; the first reason is the one that counts."""
        with self._loss_lock:
            if self._lost is None:
                self._lost = ProcessLostError(why, self._row(), self._compiling)
                self._process.kill()
                self._process.wait()
                for sock in (self._calls, self._steps):
                    with contextlib.suppress(OSError):
                        sock.shutdown(socket.SHUT_RDWR)
                    if sock not in self._asking:  # else whoever asks closes it
                        sock.close()
            lost = self._lost
        return ProcessLostError(lost.why, lost.row, lost.compiling)

    def _ask(
        self, sock: socket.socket, header: Mapping[str, Any], limit: _Limit
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        frame, why = None, Lost.ENDED
        with self._loss_lock:
            lost = self._lost
            if lost is None:
                self._asking.add(sock)
        if lost is not None:
            raise ProcessLostError(lost.why, lost.row, lost.compiling)
        try:
            sock.settimeout(HANG_LIMIT)
            send_frame(sock, header)
            frame, why = _answer(sock, limit)
        except TimeoutError:
            why = Lost.HUNG
        except (OSError, TransferFailed):
            pass
        with self._loss_lock:
            self._asking.discard(sock)
            if self._lost is not None:
                sock.close()
        if frame is None:
            raise self._lose(why)
        return frame


class _Limit:
    """Says when whoever waits for a process has waited long enough."""

    def exceeded(self) -> Lost | None:
        raise NotImplementedError


class _WallLimit(_Limit):
    def __init__(self, seconds: float) -> None:
        self._deadline = time.monotonic() + seconds

    def exceeded(self) -> Lost | None:
        return Lost.HUNG if time.monotonic() > self._deadline else None


class _ProcessorLimit(_Limit):
    """``seconds`` of processor time of ``thread``, anew for each ``row``; and no standstill."""

    def __init__(
        self, pid: int, thread: int, seconds: float, why: Lost, row: Callable[[], int] = int
    ) -> None:
        self._whole, self._thread = f"/proc/{pid}/stat", f"/proc/{pid}/task/{thread}/stat"
        self._seconds, self._why, self._row = seconds, why, row
        self._at, self._began = row(), _processor_time(self._thread)
        self._used, self._since = _processor_time(self._whole), time.monotonic()

    def exceeded(self) -> Lost | None:
        used, row, now = _processor_time(self._whole), self._row(), time.monotonic()
        if used > self._used or row != self._at:
            self._used, self._since = used, now
        elif now - self._since > HANG_LIMIT:
            return Lost.HUNG
        spent = _processor_time(self._thread)
        if row != self._at:
            self._at, self._began = row, spent
        return self._why if spent - self._began > self._seconds else None


def _answer(
    sock: socket.socket, limit: _Limit
) -> tuple[tuple[dict[str, Any], dict[str, Tensor]] | None, Lost]:
    """The frame that comes, if one does."""
    readable = select.poll()
    readable.register(sock, select.POLLIN)
    while not readable.poll(_WATCH_EVERY * 1000):
        why = limit.exceeded()
        if why is not None:
            return None, why
    return recv_frame(sock), Lost.ENDED


def _processor_time(stat: str) -> float:
    """Seconds that a process or thread has run; where nobody counts, the time on the wall."""
    try:
        fields = Path(stat).read_text().rpartition(")")[2].split()
    except OSError:
        return time.monotonic()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
