"""Ranks of this process's engines, forked as the scripts of trainers are: see ``forked``.

For files that start many engines and show nothing of how a rank's process begins.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from types import SimpleNamespace
from typing import Any

from forked import CONTEXT, ensure_running

from rollout.engine.executors import rank_link


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Until it is left, ranks begin with what the others have imported."""
    ensure_running()
    rank_link.subprocess = SimpleNamespace(  # type: ignore[assignment]
        Popen=_Rank, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    try:
        yield
    finally:
        rank_link.subprocess = subprocess


class _Rank:
    """Of ``subprocess.Popen`` what an engine asks of a rank's process."""

    def __init__(
        self, command: Sequence[str], *, pass_fds: Sequence[int], env: dict[str, str], **_: Any
    ) -> None:
        *_, module = command[:4]
        assert module == "rollout.engine.worker", command
        fds = [_Passed(fd) for fd in (2, *pass_fds)]
        self._process = CONTEXT.Process(target=_run, args=(command[4:], fds, env), daemon=True)
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a rank", timeout or 0.0)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


class _Passed:
    """A descriptor that has another number in the process it goes to, and that one here."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __reduce__(self) -> Any:
        return _pair, (self._fd, DupFd(self._fd))


def _pair(before: int, passed: Any) -> tuple[int, int]:
    return before, passed.detach()


def _run(options: Sequence[str], fds: Sequence[Any], env: dict[str, str]) -> None:
    from rollout.engine.worker.rank_process import main

    os.setpgid(0, 0)
    os.environ.clear()
    os.environ.update(env)
    (_, said), *passed = fds
    for number in (1, 2):
        os.dup2(said, number)
    here = {str(before): str(fd) for before, fd in passed}
    main([here.get(option, option) for option in options])
