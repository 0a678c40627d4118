"""Ends trainers in many ways, and looks at how they ended and what they left behind."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from serving import alive, serve
from tiny_models import write_tiny

TRANSPORTS = ("inline", "grpc_stream", "ipc", "broadcast", "p2p")
OUTCOMES = ("committed", "aborted", "failed")
LIMIT = 60.0  # seconds for one case, for hangs
PROMPT = 2.0  # seconds from main's return to the end of the process


@dataclass(frozen=True, slots=True)
class Case:
    transport: str
    ranks: int  # 1: a plain trainer; 2: FSDP2
    outcome: str
    closed: bool = False  # whether it shuts its Rollout down
    destroyed: bool = False  # whether it destroys its own process group
    kept: bool = True  # whether the Rollout lives until the interpreter ends
    embedded: int = 0  # ranks of an engine of its own, in place of the service's


@contextmanager
def exiting_trainers(folders: Any) -> Iterator[Exits]:
    """Trainers of a tiny model, and a service of it; nothing of them is left at the end."""
    model = folders.mktemp("model")
    write_tiny(model)
    with nothing_left_in_shared_memory(), serve(model, "--tensor-parallel-size", "2") as served:
        trainers = Exits(model, served.grpc, folders.mktemp("scratch"))
        try:
            yield trainers
        finally:
            trainers.close()


class Exits:
    """The process that trainers are forked from."""

    def __init__(self, model: Path, address: str, scratch: Path) -> None:
        self._model, self._address, self._scratch = model, address, scratch
        self._log = scratch / "trainers.log"
        tests = Path(__file__).parent
        roots = os.pathsep.join(map(str, [tests.parent, tests]))
        self._process = subprocess.Popen(
            [sys.executable, str(tests / "exiting_trainer.py"), str(model)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": roots, "OMP_NUM_THREADS": "1",
                 "OMP_WAIT_POLICY": "PASSIVE"},
        )  # fmt: skip

    def run(self, case: Case) -> list[float]:
        """Seconds from main's return to the end, of each rank.

        Fails where one did not end well, or left a process behind.
        """
        ends = self.ends(case)
        told = f"{case} ended with {ends}:\n{self._log.read_text()[-4000:]}"
        assert all(end["status"] == 0 and end["seconds"] is not None for end in ends), told
        assert not (left := self.left()), f"{case} left processes {left}"
        return [end["seconds"] for end in ends]

    def ends(self, case: Case) -> list[dict[str, Any]]:
        """Exit status, negative for a signal, and those seconds, of each rank."""
        given = {
            **asdict(case), "address": self._address, "model": str(self._model),
            "scratch": str(self._scratch), "log": str(self._log),
        }  # fmt: skip
        self._log.write_text("")
        with contextlib.suppress(FileNotFoundError):
            Path(self._scratch, "rendezvous").unlink()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(LIMIT, self._process.kill)
        timer.start()
        self._process.stdin.write(json.dumps(given) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        timer.cancel()
        assert line, f"{case} hung:\n{self._log.read_text()[-4000:]}"
        ends: list[dict[str, Any]] = json.loads(line)
        return ends

    def left(self) -> list[int]:
        """Processes that trainers have left behind."""
        mine = self._process.pid
        return [pid for pid in _session(mine) if pid != mine and alive(pid)]

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()


def variants(transport: str, ranks: int, outcome: str, exits: int) -> Iterator[Case]:
    """``exits`` ways to end: with and without closing, destroying, and a name that is kept."""
    for index in range(exits):
        closed, destroyed, kept = index % 2 == 1, index % 4 >= 2, index % 3 != 2
        yield Case(transport, ranks, outcome, closed, destroyed, kept)


@contextmanager
def nothing_left_in_shared_memory() -> Iterator[None]:
    """Of what has come meanwhile; tests beside this one have files there, too, for a while."""

    def found() -> set[str]:
        return {path.name for path in Path("/dev/shm").glob("rollout-*")}

    before = found()
    yield
    new, deadline = found() - before, time.monotonic() + LIMIT
    while left := new & found():
        assert time.monotonic() < deadline, f"left in /dev/shm: {sorted(left)}"
        time.sleep(0.1)


def _session(leader: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader:
                    found.append(int(folder.name))
    return found
