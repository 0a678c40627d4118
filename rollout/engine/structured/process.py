"""The engine's end of the process that follows grammars, and its deadlines."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from rollout.distributed.child_environment import child_environment
from rollout.errors import EngineError, TransferFailed, from_wire
from rollout.wire.frames import recv_frame, send_frame

# What became of a row: a mask, nothing may follow, no such text, its time is used up.
FOLLOWS, DONE, REFUSED, SLOW = range(4)


def mask_width(vocab_size: int) -> int:
    """How many int32 hold a bit for each token."""
    return (vocab_size + 31) // 32


class ProcessLostError(Exception):
    """It did not answer in time (``late``), or ended; ``row`` was under way."""

    def __init__(self, row: int, late: bool) -> None:
        super().__init__("too slow" if late else "its process ended")
        self.row, self.late = row, late


class GrammarProcess:
    """One process; ``compile`` and ``masks`` may be called in two threads, each by one at a time.

    After a ``ProcessLostError`` it is killed, and of no more use.
    """

    def __init__(self, settings: Mapping[str, Any], timeout: float) -> None:
        """Started and ready; ``EngineError`` where it is not within ``timeout`` seconds."""
        self.told: dict[int, int] = {}  # sequence -> how many of its tokens it knows
        self._ended = False
        self._asking: set[socket.socket] = set()
        self._calls, theirs = socket.socketpair()
        self._steps, mask_end = socket.socketpair()
        progress = os.memfd_create("rollout-grammar-progress")
        os.truncate(progress, mmap.PAGESIZE)
        self._progress = mmap.mmap(progress, mmap.PAGESIZE)
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
            self._ask(self._calls, settings, timeout)
        except ProcessLostError as error:
            raise EngineError(
                "the process that follows grammars did not start; its own words are on stderr"
            ) from error

    def compile(self, spec: Mapping[str, Any], timeout: float) -> None:
        """Raises ``InvalidRequest``, or ``ProcessLostError``."""
        reply, _ = self._ask(self._calls, {"spec": spec}, timeout)
        if "error" in reply:
            raise from_wire(reply["error"])

    def masks(
        self, rows: Sequence[Mapping[str, Any]], forget: Sequence[int], timeout: float
    ) -> tuple[list[int], Tensor]:
        """States of the rows, and int32 [rows, mask_width]; raises ``ProcessLostError``."""
        self._progress[:8] = bytes(8)
        reply, tensors = self._ask(self._steps, {"rows": rows, "forget": forget}, timeout)
        return reply["states"], tensors["masks"]

    @property
    def alive(self) -> bool:
        return not self._ended and self._process.poll() is None

    def close(self) -> None:
        """End it; from any thread. Whoever waits for an answer gets ``ProcessLostError``."""
        self._ended = True
        self._process.kill()
        self._process.wait()
        for sock in (self._calls, self._steps):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            if sock not in self._asking:  # else whoever asks closes it
                sock.close()

    def _ask(
        self, sock: socket.socket, header: Mapping[str, Any], timeout: float
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        sock.settimeout(timeout)
        late = False
        self._asking.add(sock)
        try:
            send_frame(sock, header)
            frame = recv_frame(sock)
        except TimeoutError:
            frame, late = None, True
        except (OSError, TransferFailed):
            frame = None
        self._asking.discard(sock)
        if frame is None:
            row = int.from_bytes(self._progress[:8], "little")
            self.close()
            raise ProcessLostError(row, late)
        return frame
