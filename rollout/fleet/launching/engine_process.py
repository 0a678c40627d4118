"""``rollout serve`` or ``fleet`` as a child process: it ends with its parent, however that ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TextIO

from rollout.distributed import LOOPBACK
from rollout.distributed.child_environment import child_environment
from rollout.errors import WorkerDied

START_LIMIT = 3600.0  # seconds in which it has to be ready
END_WAIT = 10.0  # seconds in which it ends by itself
_KEPT = 5  # lines of its log


class ServiceProcess:
    """``rollout WORDS``, a service, under ``name`` in the log.

    ``settings``: of its environment. ``OSError`` where it cannot be started. Thread-safe.
    """

    def __init__(self, name: str, words: Sequence[str], settings: Mapping[str, str]) -> None:
        self._name, self._last = name, deque[str](maxlen=_KEPT)
        self.http = ""
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rollout", *words, "--exit-with-stdin"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=child_environment(settings),
            start_new_session=True,  # Ctrl-C is its parent's to tell it of
        )  # fmt: skip
        assert self._process.stderr is not None
        self._log = threading.Thread(
            target=pass_on, args=(name, self._process.stderr, self._last),
            name=f"rollout-{name}-log", daemon=True,
        )  # fmt: skip
        self._log.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ready(self) -> str:
        """Blocks; the "host:port" of its gRPC server, after which ``http`` is that of the other.
        ``WorkerDied`` where it did not get ready.
        """
        assert self._process.stdout is not None
        late = threading.Timer(START_LIMIT, self._process.kill)
        late.daemon = True
        late.start()
        words = self._process.stdout.readline().split()
        late.cancel()
        if len(words) != 3 or words[0] != "ready":
            self._process.kill()
            status = self._process.wait()
            self._log.join(1.0)
            raise WorkerDied(
                f"{self._name} ended with status {status} before it was ready; the end of its log: "
                f"{self._last[-1] if self._last else 'there is none'}"
            )
        self.http = words[1].removeprefix("http=")
        return words[2].removeprefix("grpc=")

    def ended(self) -> int | None:
        """Its status, if it has ended."""
        return self._process.poll()

    def wait(self) -> int:
        """Blocks until it has ended; its status."""
        return self._process.wait()

    def end(self) -> None:
        """By itself if it does so in ``END_WAIT`` seconds. Idempotent."""
        if self._process.stdin is not None:
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        try:
            self._process.wait(END_WAIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class EngineProcess(ServiceProcess):
    """``rollout serve WORDS`` at free ports of ``host``."""

    def __init__(
        self, name: str, words: Sequence[str], settings: Mapping[str, str], host: str = LOOPBACK
    ) -> None:
        at = ("--host", host, "--port", "0", "--grpc-port", "0")
        super().__init__(name, ["serve", *words, *at], settings)


def pass_on(name: str, lines: TextIO, last: deque[str]) -> None:
    """The lines of a log on our own, each behind ``name``, until there are no more; ``last`` keeps
    those that it has room for.
    """
    with lines, contextlib.suppress(ValueError, OSError):  # ours may be closed before theirs
        for line in lines:
            last.append(line.strip())
            sys.stderr.write(f"{name}: {line.removesuffix(os.linesep)}\n")
            sys.stderr.flush()
