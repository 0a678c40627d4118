"""A place in a foreign gloo group, held by a process of its own.

gloo ends the whole process when a message is longer than its receive, and a broadcast that is
waited for cannot be given up. A peer of ours says what comes before it sends; a foreign one may
send something else than it announced, or nothing. Then this process is lost, not the engine's.

    rank --{"group", "rank", "timeout"}--> process --{"ok"} or {"error"}--> rank
         --{"nbytes"} ------------------->         (the bytes lie in memory that both map; 0 asks
                                                    whether the trainer's store is there)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from typing import Any

import torch
from torch import Tensor

from rollout.distributed.child_environment import child_environment
from rollout.distributed.life_lines import closed_in_forks
from rollout.errors import DeadlineExceeded, RolloutError, TransferFailed, from_wire
from rollout.weight_sync.transports.foreign_group import ALIVE_LIMIT, START_LIMIT, ForeignGroup
from rollout.wire.frames import recv_frame, send_frame

MODULE = "rollout.weight_sync.transports.foreign_gloo_process"


class GlooMember:
    """Rank ``rank`` of ``group``; starts its process at ``join``."""

    def __init__(self, group: ForeignGroup, rank: int) -> None:
        self._group, self._rank = group, rank
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._memory, self._size = _anonymous_file(), 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._closed = False

    def join(self, timeout: float) -> None:
        self._start()
        self._answer(START_LIMIT, "the start of the process that holds the place")
        self._tell(group=self._group.to_wire(), rank=self._rank, timeout=timeout)
        self._answer(timeout + 1.0, "the rendezvous; are all members up?")

    def receive(self, nbytes: int, timeout: float) -> Tensor:
        if nbytes == 0:
            return self._buffer[:0]
        if nbytes > self._size:
            self._grow(nbytes)
        self._tell(nbytes=nbytes)
        self._answer(timeout, f"a broadcast of {nbytes} bytes; does the trainer send them?")
        return self._buffer[:nbytes]

    def is_alive(self) -> bool:
        try:
            self._tell(nbytes=0)
            self._answer(ALIVE_LIMIT, "asking the trainer's store")
        except RolloutError:
            return False
        return True

    def close(self) -> None:
        """End the process, which frees the other members at once. Idempotent."""
        with self._lock:
            self._closed, first = True, not self._closed
        if not first:
            return
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)  # wakes a thread that reads
            self._sock.close()
        os.close(self._memory)

    # ---- helpers ----

    def _grow(self, nbytes: int) -> None:
        with self._lock:  # a descriptor that was closed may be somebody else's by now
            closed = self._closed
            if not closed:
                os.ftruncate(self._memory, nbytes)
                mapped = mmap.mmap(self._memory, nbytes)
                self._buffer, self._size = torch.frombuffer(mapped, dtype=torch.uint8), nbytes
        if closed:
            raise self._gone()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with self._lock, theirs:
            self._sock = closed_in_forks(ours)
            if self._closed:
                ours.close()
                return
            fds = (theirs.fileno(), self._memory)
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,
                env=child_environment({"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL"}),
                process_group=0,
            )

    def _tell(self, **what: Any) -> None:
        try:
            assert self._sock is not None
            send_frame(self._sock, what)
        except OSError as error:
            raise self._gone() from error

    def _answer(self, timeout: float, phase: str) -> None:
        assert self._sock is not None
        try:
            self._sock.settimeout(timeout)
            frame = recv_frame(self._sock)
        except TimeoutError as error:
            self.close()
            raise DeadlineExceeded(
                f"{self._place}: nothing within {timeout:g} s (phase: {phase})"
            ) from error
        except (OSError, TransferFailed) as error:
            raise self._gone() from error
        if frame is None:
            raise self._gone()
        if "error" in frame[0]:
            self.close()
            raise from_wire(frame[0]["error"])

    @property
    def _place(self) -> str:
        group = self._group
        return f"rank {self._rank} of {group.size} of the group at {group.host}:{group.port}"

    def _gone(self) -> TransferFailed:
        code = None
        if not self._closed and self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self._process.wait(1.0)
        self.close()
        if code is None:
            return TransferFailed(f"{self._place}: the group was left")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return TransferFailed(
            f"{self._place}: its process ended ({how}): gloo does so when a message is longer than "
            "what was announced; do names, dtypes, shapes and packing match what is sent?"
        )


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rollout-foreign", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
