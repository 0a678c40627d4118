"""Engines that the front starts itself, on its own host: started again when their process ends."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TextIO

import torch

from rollout.distributed.child_environment import child_environment
from rollout.errors import ConfigError, WorkerDied
from rollout.fleet.fleet import Fleet

log = logging.getLogger(__name__)
START_LIMIT = 3600.0  # seconds in which a member has to be ready
END_WAIT = 10.0  # seconds in which a member ends by itself
AGAIN_AFTER, AGAIN_AT_MOST = 1.0, 30.0  # seconds until one is started again


class Replicas:
    """``count`` processes of ``rollout serve MODEL FLAGS``, members of ``fleet``.

    They listen on loopback with a token that nobody else is told, and end with this process,
    however it ends. One that ends is started again, later each time it has not lasted.
    """

    def __init__(
        self,
        fleet: Fleet,
        model: str,
        flags: Sequence[str],
        count: int,
        gpus: Sequence[Sequence[str]] = (),
        journal: Path | None = None,
    ) -> None:
        """``gpus``: those of each replica, as CUDA_VISIBLE_DEVICES names them; () is on CPUs.
        ``journal``: a directory, in which each replica has one of its name.
        """
        self._journal = journal
        self._fleet, self._count = fleet, count
        self._gpus = {_name(n): ",".join(each) for n, each in enumerate(gpus)}
        self._command = [
            sys.executable, "-P", "-m", "rollout", "serve", model, "--host", "127.0.0.1",
            "--port", "0", "--grpc-port", "0", "--exit-with-stdin", *flags,
        ]  # fmt: skip
        self._token = secrets.token_hex(16)
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._watchers: list[threading.Thread] = []

    def start(self) -> None:
        """Blocks until all are ready; the first one's failure is raised, and ends the others."""
        names = [_name(index) for index in range(self._count)]
        with ThreadPoolExecutor(self._count) as pool:
            try:
                addresses = list(pool.map(self._spawn, names))
            except BaseException:
                self.close()
                raise
        for name, address in zip(names, addresses, strict=True):
            self._fleet.add(address, self._token, name)
            watcher = threading.Thread(
                target=self._watch, args=(name,), name=f"rollout-{name}", daemon=True
            )
            self._watchers.append(watcher)
            watcher.start()

    def close(self) -> None:
        """End all; those that do not end by themselves are killed. Idempotent."""
        self._closing.set()
        with self._lock:
            processes = list(self._processes.values())
        for process in processes:
            if process.stdin is not None:
                process.stdin.close()  # by which they end
        deadline = time.monotonic() + END_WAIT
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for watcher in self._watchers:
            watcher.join(END_WAIT)

    def pids(self) -> dict[str, int]:
        with self._lock:
            return {name: process.pid for name, process in self._processes.items()}

    # ---- helpers ----

    def _spawn(self, name: str) -> str:
        """The gRPC address of a new process; ``WorkerDied`` where it did not become ready."""
        settings = {"ROLLOUT_TOKEN": self._token}
        if name in self._gpus:
            settings["CUDA_VISIBLE_DEVICES"] = self._gpus[name]
        environment = child_environment(settings)
        process = subprocess.Popen(
            [*self._command, *self._own_flags(name)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env=environment,
            start_new_session=True,  # Ctrl-C is ours to tell them of
        )  # fmt: skip
        assert process.stderr is not None
        threading.Thread(
            target=pass_on, args=(name, process.stderr), name=f"rollout-{name}-log", daemon=True
        ).start()
        with self._lock:
            self._processes[name] = process
        if self._closing.is_set() and process.stdin is not None:
            process.stdin.close()
        assert process.stdout is not None
        late = threading.Timer(START_LIMIT, process.kill)
        late.daemon = True
        late.start()
        words = process.stdout.readline().split()
        late.cancel()
        if len(words) != 3 or words[0] != "ready":
            process.kill()
            status = process.wait()
            raise WorkerDied(
                f"{name} ended with status {status} before it was ready; its own log, above, says "
                "why"
            )
        return words[2].removeprefix("grpc=")

    def _own_flags(self, name: str) -> list[str]:
        """A journal has one writer, which forgets what is oldest."""
        return [] if self._journal is None else ["--journal", str(self._journal / name)]

    def _watch(self, name: str) -> None:
        """Start ``name`` again whenever its process has ended."""
        pause = AGAIN_AFTER
        while True:
            with self._lock:
                process = self._processes[name]
            began = time.monotonic()
            status = process.wait()
            if self._closing.is_set():
                return
            log.error("%s ended with status %d; another is started", name, status)
            self._fleet.died(name)
            pause = AGAIN_AFTER if time.monotonic() - began > 60 else min(2 * pause, AGAIN_AT_MOST)
            while not self._closing.wait(pause):
                try:
                    address = self._spawn(name)
                except (OSError, WorkerDied) as error:
                    log.error("%s could not be started again: %s", name, error)
                    pause = min(2 * pause, AGAIN_AT_MOST)
                    continue
                self._fleet.add(address, self._token, name)
                break


def pass_on(name: str, lines: TextIO) -> None:
    """The lines of a replica's log on our own, each behind its name; until there are no more."""
    with lines, contextlib.suppress(ValueError, OSError):  # ours may be closed before theirs
        for line in lines:
            sys.stderr.write(f"{name}: {line.removesuffix(chr(10))}\n")
            sys.stderr.flush()


def _name(index: int) -> str:
    return f"replica-{index}"


def gpus_each(visible: Sequence[str], count: int, ranks: int) -> list[list[str]]:
    """``ranks`` of the ``visible`` GPUs for each of ``count`` replicas; ``ConfigError`` where they
    do not suffice.
    """
    if len(visible) < count * ranks:
        raise ConfigError(
            f"{count} replicas of {ranks} ranks need {count * ranks} GPUs, and {len(visible)} are "
            "visible: start fewer, or engines of your own and `rollout fleet` over them"
        )
    return [list(visible[n * ranks : (n + 1) * ranks]) for n in range(count)]


def visible_gpus() -> list[str]:
    """As CUDA_VISIBLE_DEVICES names them, or would."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip()]
    return [str(index) for index in range(torch.cuda.device_count())]


def threads_each(count: int) -> int:
    """Of the processors that this process may use, an equal share for each replica."""
    return max(1, len(os.sched_getaffinity(0)) // count)
