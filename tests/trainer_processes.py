"""Trainer jobs as processes that obey commands."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch.distributed as dist

TESTS = Path(__file__).parent


class Job:
    """A trainer job: the same command to every rank, one answer of each.

    Every rank runs ``script RANK WORLD PORT ARGUMENT ...``, reads JSON lines, and answers each.
    """

    def __init__(self, script: Path, world: int, log: Path, *arguments: str) -> None:
        self.world = world
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        roots = os.pathsep.join(map(str, [TESTS.parent, TESTS, script.parent]))
        env = {
            **os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE",
            "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        self.log = log
        self._log = log.open("wb")
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(rank), str(world), str(self._store.port),
                 *arguments],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, env=env,
            )
            for rank in range(world)
        ]  # fmt: skip
        self._lines: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in self.ranks]
        for process, lines in zip(self.ranks, self._lines, strict=True):
            threading.Thread(target=self._read, args=(process, lines), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[bytes], lines: queue.SimpleQueue[bytes]) -> None:
        assert process.stdout is not None
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
            assert process.stdin is not None
            process.stdin.write(line)
            process.stdin.flush()
        return self.answers(180)

    def close(self) -> None:
        for process in self.ranks:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(b'{"op": "end"}\n')
                process.stdin.close()
        for process in self.ranks:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._log.close()
        for left in Path("/dev/shm").glob("deepspeed_*"):
            left.unlink(missing_ok=True)
