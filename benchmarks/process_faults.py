"""What may befall a fleet of real processes: its front, its engines, their network, disk and clock.

Each fault begins now and is over when ``end`` is called. As root each process also has a clock of
its own, which begins elsewhere in each of its lives (a time namespace), and the record has a disk
of its own (a loop device).
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from free_ports import free_port
from proxies import Proxy

END_LIMIT = 60.0  # seconds that an engine has which was told to end
FAR = 10_000_000  # seconds between what two clocks say, at most


class Disk:
    """Where the record lies: a small file system of its own, where there can be one."""

    def __init__(self, folder: Path) -> None:
        self.folder, image = folder / "disk", folder / "image"
        self.folder.mkdir()
        self.is_own = False
        if os.geteuid() == 0:
            image.write_bytes(bytes(8 << 20))
            steps = (["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", image, self.folder])
            self.is_own = all(_does(*step) for step in steps)

    def fill(self) -> None:
        """Not a byte is left."""
        with contextlib.suppress(OSError), (self.folder / "filler").open("wb") as filler:
            while True:
                os.write(filler.fileno(), bytes(1 << 12))

    def clear(self) -> None:
        (self.folder / "filler").unlink(missing_ok=True)

    def freeze(self) -> None:
        """Whoever writes waits, as for a disk that is slow, until ``thaw``."""
        _does("fsfreeze", "-f", self.folder)

    def thaw(self) -> None:
        _does("fsfreeze", "-u", self.folder)

    def close(self) -> None:
        if self.is_own:
            self.thaw()
            _does("umount", self.folder)


class Place:
    """A process that listens at one port, life after life. ``proxy``: how others reach it."""

    def __init__(self, name: str, folder: Path, words: list[str]) -> None:
        self.name, self._words = name, words
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.proxy = Proxy(self.address)
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        words = [*_own_clock(), sys.executable, "-m", "rollout", *self._words, "--port", "0"]
        words += ["--grpc-port", str(self.port), "--exit-with-stdin"]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
            )  # fmt: skip

    def wait_ready(self) -> None:
        line = self.process.stdout.readline()
        if not line.startswith("ready"):
            raise RuntimeError(f"{self.name} did not start: {self.log.read_text()[-2000:]}")

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Of its process, in whatever state that is."""
        self.process.kill()
        self.process.wait(30)
        for pipe in (self.process.stdin, self.process.stdout):
            pipe.close()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.end()
        self.proxy.__exit__()


@dataclass(frozen=True, slots=True)
class Fault:
    """``of_front``: calls of clients may fail by it. ``loses``: a member's weights."""

    kind: str
    begin: Callable[[], None]
    end: Callable[[], None]
    of_front: bool = False
    loses: bool = False


def of_member(place: Place) -> list[Fault]:
    proxy = place.proxy

    def again() -> None:
        place.process.wait(END_LIMIT)
        place.end()
        place.start()

    return [
        Fault("member killed", place.end, place.start, loses=True),
        Fault("member told to end", partial(place.signal, signal.SIGTERM), again, loses=True),
        _stopped("member", place, of_front=False),
        Fault("member cut off", proxy.hold, proxy.go_on),
        Fault("member's answers held", partial(proxy.hold, up=False), proxy.go_on),
        Fault("member's calls held", partial(proxy.hold, down=False), proxy.go_on),
        Fault("member's connections reset", proxy.cut, lambda: None),
    ]


def of_front(place: Place, disk: Disk) -> list[Fault]:
    faults = [
        Fault("front killed", place.end, place.start, of_front=True),
        _stopped("front", place, of_front=True),
    ]
    if not disk.is_own:
        no_more = Fault("disk full", partial(_limit, place, 0), partial(_limit, place, None))
        return [*faults, no_more]
    return [
        *faults,
        Fault("disk full", disk.fill, disk.clear),
        Fault("disk slow", disk.freeze, disk.thaw),
    ]


def _stopped(who: str, place: Place, *, of_front: bool) -> Fault:
    begin, end = (partial(place.signal, number) for number in (signal.SIGSTOP, signal.SIGCONT))
    return Fault(f"{who} stopped", begin, end, of_front=of_front)


def _own_clock() -> list[str]:
    """Words before a command: what no host sets, neither, begins elsewhere for it."""
    words = ["unshare", "--time"]
    for clock in ("monotonic", "boottime"):
        words += [f"--{clock}", str(random.randrange(FAR))]
    return words if _does(*words, "true") else []


def _limit(place: Place, nbytes: int | None) -> None:
    """How long a file of its process may become; None is as long as before."""
    _, hard = resource.prlimit(place.process.pid, resource.RLIMIT_FSIZE)
    soft = hard if nbytes is None else nbytes
    resource.prlimit(place.process.pid, resource.RLIMIT_FSIZE, (soft, hard))


def _does(*words: object) -> bool:
    try:
        done = subprocess.run([str(w) for w in words], capture_output=True, check=False)
    except OSError:  # there is no such command
        return False
    return done.returncode == 0


def eventually(condition: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
