"""Child processes that cannot outlive the demo: the rollout service and the trainer's ranks.

Each child holds the reading end of a pipe as its stdin and ends when that closes, so it goes away
with its parent however the parent ends.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

READY_LIMIT = 120.0  # seconds until a service must have said that it is ready
END_LIMIT = 10.0


class DemoError(Exception):
    """A child failed; the message holds its own last words."""


@contextlib.contextmanager
def rollout_service(checkpoint: Path, log: Path, *flags: str) -> Iterator[str]:
    """``rollout serve CHECKPOINT`` as its own process; yields its gRPC address."""
    command = [sys.executable, "-m", "rollout", "serve", str(checkpoint)]
    command += ["--port", "0", "--grpc-port", "0", "--exit-with-stdin", *flags]
    with log.open("w") as errors, _child(command, errors) as process:
        yield _ready_address(process, log)


@contextlib.contextmanager
def python_child(script: Path, log: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``python SCRIPT ARGUMENTS`` with stdout as a pipe and stderr in ``log``."""
    with (
        log.open("w") as errors,
        _child([sys.executable, str(script), *arguments], errors) as process,
    ):
        yield process


def end_in_order() -> None:
    """Ctrl-C and SIGTERM then end this process with its children and its scratch folder."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))


def end_with_parent() -> None:
    """In a child: exit at once when stdin closes, so when the parent is gone."""

    def watch() -> None:
        while os.read(0, 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def last_words(log: Path, lines: int = 15) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


@contextlib.contextmanager
def _child(command: Sequence[str], errors: object) -> Iterator[subprocess.Popen[str]]:
    """Runs in its own session: Ctrl-C reaches the parent alone, which ends its children."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,  # type: ignore[call-overload]
        text=True,
        env=_environment(),
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(END_LIMIT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]


def _environment() -> dict[str, str]:
    """One quiet thread per process: four of them share a laptop's cores; gloo on loopback."""
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1"}
    quiet["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return {**os.environ, **quiet}


def _ready_address(process: subprocess.Popen[str], log: Path) -> str:
    """The gRPC address in the line ``ready http=HOST:PORT grpc=HOST:PORT``."""
    assert process.stdout is not None
    timer = threading.Timer(READY_LIMIT, process.kill)
    timer.daemon = True  # whoever is told to end meanwhile does not wait for it
    timer.start()
    line = process.stdout.readline()
    timer.cancel()
    if not line.startswith("ready "):
        raise DemoError(f"the rollout service did not start:\n{last_words(log)}")
    return line.split("grpc=")[1].strip()
