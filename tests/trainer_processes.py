"""Trainer jobs as processes that obey commands."""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist
from forked import Script


class Job:
    """A trainer job: the same command to every rank, one answer of each.

    Every rank runs ``script RANK WORLD PORT ARGUMENT ...``, reads JSON lines, and answers each.
    """

    def __init__(self, script: Path, world: int, log: Path, *arguments: str) -> None:
        self.world = world
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.log = log
        log.touch()
        self.ranks = [
            Script(script, [str(rank), str(world), str(self._store.port), *arguments], log)
            for rank in range(world)
        ]
        self._lines: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in self.ranks]
        self._threads = [
            threading.Thread(target=self._read, args=given, daemon=True)
            for given in zip(self.ranks, self._lines, strict=True)
        ]
        for thread in self._threads:
            thread.start()

    @staticmethod
    def _read(process: Script, lines: queue.SimpleQueue[bytes]) -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(b"")

    def answers(self, timeout: float) -> list[dict[str, Any] | None]:
        """One answer of each rank; None of a rank that has died."""
        got = [lines.get(timeout=timeout) for lines in self._lines]
        return [json.loads(line) if line else None for line in got]

    def ask(self, **command: Any) -> list[dict[str, Any] | None]:
        line = json.dumps(command).encode() + b"\n"
        for process in self.ranks:
            process.stdin.write(line)
        return self.answers(180)

    def close(self) -> None:
        for process in self.ranks:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b'{"op": "end"}\n')
            process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(30)
            except TimeoutError:
                process.kill()
                process.wait()
        for thread in self._threads:
            thread.join(30)
        for process in self.ranks:
            process.close()
        for left in Path("/dev/shm").glob("deepspeed_*"):
            left.unlink(missing_ok=True)
