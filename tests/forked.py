"""Scripts of trainers, in processes forked from one that has imported what they all need.

Importing takes such a process seconds, its part of a test often less than one.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["trainer_imports"])
_TESTS = Path(__file__).parent
# Whoever is forked has them from the start: libraries read them when they are imported.
QUIET = {
    "PYTHONPATH": os.pathsep.join(map(str, [_TESTS.parent, _TESTS])),
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
}


def ensure_running() -> None:
    """The process that others are forked from."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    try:
        forkserver.ensure_running()
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


class Script:
    """``python script ARGUMENT ...`` with pipes as its stdin and stdout; stderr goes to ``log``,
    and so does stdout where the script does not talk.

    It ends with this process. ``env`` is set beside ``QUIET``.
    """

    def __init__(
        self, script: Path, arguments: list[str], log: Path, env: Mapping[str, str] | None = None,
        *, talks: bool = True,
    ) -> None:  # fmt: skip
        theirs, ours = CONTEXT.Pipe(duplex=False)
        mine, yours = CONTEXT.Pipe(duplex=False)
        run = (str(script), arguments, str(log), dict(env or {}), theirs, yours if talks else None)
        self._process = CONTEXT.Process(target=_run, args=run, daemon=True)
        ensure_running()
        self._process.start()
        theirs.close()
        yours.close()
        self.stdin, self.stdout = _file(ours, "wb"), _file(mine, "rb")

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, negative for a signal; ``TimeoutError`` while it runs on."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"{self._process.pid} still runs after {timeout} s")
        return self._process.exitcode

    @property
    def pid(self) -> int:
        pid: int | None = self._process.pid
        assert pid is not None
        return pid

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Let go of its pipes."""
        for pipe in (self.stdin, self.stdout):
            if not pipe.closed:
                pipe.close()


def said_by(script: Path, arguments: list[str], env: Mapping[str, str] | None = None) -> str:
    """What ``script`` prints until it ends, with status 0."""
    with tempfile.NamedTemporaryFile("r") as log:
        job = Script(script, arguments, Path(log.name), env)
        try:
            job.stdin.close()
            said = job.stdout.read().decode()
            assert job.wait(30) == 0, log.read()[-4000:]
        finally:
            job.kill()
            job.close()
    return said


def _file(pipe: Connection, mode: str) -> BinaryIO:
    file: Any = os.fdopen(os.dup(pipe.fileno()), mode, buffering=0 if mode == "wb" else -1)
    pipe.close()
    return file


def _run(
    script: str, arguments: list[str], log: str, env: dict[str, str],
    stdin: Connection, stdout: Connection | None,
) -> None:  # fmt: skip
    os.environ.update({**QUIET, **env})
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    said = written if stdout is None else stdout.fileno()
    for number, fd in enumerate((stdin.fileno(), said, written)):
        os.dup2(fd, number)
    stdin.close()
    if stdout is not None:
        stdout.close()
    os.close(written)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
