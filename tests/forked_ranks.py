"""``python -m rollout...`` of this process, forked as the scripts of trainers are: see ``forked``.

For tests that start many engines or servers and show nothing of how such a process begins. What
these start in their turn is forked too, and is below them as ever.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import connection, forkserver, util
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import IO, Any

from forked import CONTEXT, ensure_running

from rollout.engine.executors import rank_link
from rollout.fleet.launching import engine_process
from rollout.weight_sync.transports import foreign_gloo

_STARTING = (rank_link, engine_process, foreign_gloo)  # the modules that start processes


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Until it is left, what begins by ``_STARTING`` has imported what the others have."""
    ensure_running()
    before = _STARTING[0].subprocess  # type: ignore[attr-defined]
    _fork_from_here_on()
    try:
        yield
    finally:
        for module in _STARTING:
            module.subprocess = before  # type: ignore[attr-defined]


class Popen:
    """Of ``subprocess.Popen`` what is asked of a process by engines, fleets and tests."""

    def __init__(
        self, command: Sequence[str], *, stdin: int | None = None, stdout: int | None = None,
        stderr: int | None = None, pass_fds: Sequence[int] = (), env: Mapping[str, str],
        start_new_session: bool = False, process_group: int | None = None, text: bool = True,
        errors: str | None = None,
    ) -> None:  # fmt: skip
        module, *options = command[command.index("-m") + 1 :]
        assert module.startswith("rollout"), command
        self._lock, theirs, files = threading.Lock(), [], []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            fd, file = _stream(number, wanted, errors)
            theirs.append(fd)
            files.append(file)
        self.stdin, self.stdout, self.stderr = files
        fds = [_Passed(fd) for fd in (*theirs, *pass_fds)]
        begin = os.setsid if start_new_session else os.setpgrp if process_group == 0 else os.getpid
        given = (module, options, fds, dict(env), os.getcwd(), begin)
        self._process = CONTEXT.Process(target=_run, args=given, daemon=True)
        ensure_running()
        self._process.start()
        self.pid: int = self._process.pid
        for fd in theirs:
            if fd > 2:
                os.close(fd)

    @property
    def returncode(self) -> int | None:
        with self._lock:  # who finds that it has ended reads its status, which is told once
            return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        code = self.returncode
        if code is None:
            raise subprocess.TimeoutExpired("a forked process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(15)

    def kill(self) -> None:
        self.send_signal(9)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """What it says from now on to stdout and stderr, until it ends."""
        if self.stdin is not None:
            self.stdin.close()
        pool = ThreadPoolExecutor(2)
        try:
            out, err = [pool.submit(_rest, file) for file in (self.stdout, self.stderr)]
            self.wait(timeout)
            return out.result(), err.result()
        finally:
            pool.shutdown(wait=False)


def _stream(number: int, wanted: int | None, errors: str | None) -> tuple[int, IO[str] | None]:
    """The descriptor that becomes a process's ``number``, and our end of it where it is a pipe."""
    if wanted == subprocess.DEVNULL:
        return os.open(os.devnull, os.O_RDWR), None
    if wanted != subprocess.PIPE:
        return (number if wanted is None else wanted), None
    read, write = os.pipe()
    if number == 0:
        return read, os.fdopen(write, "w")
    return write, os.fdopen(read, errors=errors)


def _rest(file: IO[str] | None) -> str:
    if file is None or file.closed:
        return ""
    with file:
        return file.read()


class _Passed:
    """A descriptor that has another number in the process it goes to, and that one here."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _pair, (self._fd, DupFd(self._fd))


def _pair(before: int, passed: Any) -> tuple[int, int]:
    return before, passed.detach()


# ---- in the forked process ----


def _run(
    module: str, options: Sequence[str], fds: Sequence[tuple[int, int]], env: dict[str, str],
    folder: str, begin: Any,
) -> None:  # fmt: skip
    begin()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, (_, fd) in enumerate(fds[:3]):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if module != foreign_gloo.MODULE:  # which starts none
        _fork_below()
    here = {str(before): str(fd) for before, fd in fds[3:]}
    sys.argv = [module, *(here.get(option, option) for option in options)]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code: Any = 0
    except SystemExit as end:
        code = end.code
    # As an interpreter ends, and not as a child of multiprocessing, which would end its own.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit.unregister(util._exit_function)  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code or 0)


def _fork_below() -> None:
    """What this process starts is forked from a copy of it as it is now, without threads."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("")  # to an abstract address of the kernel's choice
    listener.listen()
    alive, held = os.pipe()
    server._forkserver_address, server._forkserver_alive_fd = listener.getsockname(), held
    server._forkserver_pid = os.fork()
    if server._forkserver_pid == 0:
        _keep_only(2, listener.fileno(), alive)
        try:
            forkserver.main(listener.detach(), alive, ())
        finally:
            os._exit(0)
    listener.close()
    os.close(alive)
    multiprocessing.current_process()._config["daemon"] = False  # such may have no children
    _fork_from_here_on()


def _keep_only(*fds: int) -> None:
    """Others would hold connections open whose end is waited for."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd not in fds:
            with suppress(OSError):  # the one that lists them
                os.close(fd)
    for number in (0, 1):
        assert os.open(os.devnull, os.O_RDWR) == number


def _fork_from_here_on() -> None:
    for module in _STARTING:
        module.subprocess = SimpleNamespace(  # type: ignore[attr-defined]
            Popen=Popen, DEVNULL=subprocess.DEVNULL, PIPE=subprocess.PIPE,
            TimeoutExpired=subprocess.TimeoutExpired,
        )  # fmt: skip
