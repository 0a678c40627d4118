"""A ``rollout serve`` process for tests; nothing of it outlives the block."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import forked_ranks

START_LIMIT = 270.0


@dataclass(frozen=True, slots=True)
class Served:
    http: str  # host:port
    grpc: str
    process: subprocess.Popen[str] | forked_ranks.Popen


@contextmanager
def serve(
    model: Path | str, *flags: str, python: str = sys.executable, forked: bool = True
) -> Iterator[Served]:
    """Started, ready, and at the end terminated; fails with the server's stderr.

    ``forked``: from what has imported torch; not where a test shows how the command starts.
    """
    command = [python, "-m", "rollout", "serve", str(model), "--port", "0"]
    command += ["--grpc-port", "0", "--device", "cpu", "--num-threads", "1", "--exit-with-stdin"]
    popen = forked_ranks.Popen if forked and python == sys.executable else subprocess.Popen
    process = popen(
        [*command, *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )
    try:
        yield _ready(process)
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise AssertionError("the server did not end on SIGTERM") from None


def descendants(pid: int) -> set[int]:
    """Process ids below ``pid``, from /proc."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(folder.name)] = int(fields[1])
    found: set[int] = set()
    while more := {p for p, up in parents.items() if up in found | {pid}} - found:
        found |= more
    return found


def alive(pid: int) -> bool:
    """Whether the process runs; one that only waits to be reaped does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def _ready(process: subprocess.Popen[str] | forked_ranks.Popen) -> Served:
    assert process.stdout is not None
    assert process.stderr is not None
    timer = threading.Timer(START_LIMIT, process.kill)
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    words = line.split()
    if len(words) != 3 or words[0] != "ready":
        process.kill()
        raise AssertionError(f"no ready line but {line!r}\n{process.stderr.read()}")
    return Served(words[1].removeprefix("http="), words[2].removeprefix("grpc="), process)
