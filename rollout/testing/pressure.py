"""A full disk and exhausted memory, on purpose and for a while: what ``faults.py`` strikes with."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rollout.errors import ConfigError

LARGEST = 1 << 30  # bytes that will be filled: on purpose, so not the disk that everything needs
_BLOCK = 1 << 16


def fill_disk(directory: str | Path, spare: int = 0) -> Callable[[], None]:
    """Fill the file system that holds ``directory`` up to ``spare`` bytes; returns what empties it.

    Refused (``ConfigError``) where more than 1 GiB is free: point it at a small file system.
    """
    free = _free(directory)
    if free > LARGEST:
        raise ConfigError(
            f"{directory} has {free >> 20} MiB free, too much to fill on purpose: point the fault "
            "at a file system of at most 1 GiB, such as a small tmpfs"
        )
    handle, ballast = tempfile.mkstemp(prefix=".ballast-", dir=directory)
    try:
        while (left := _free(directory) - spare) > 0:
            try:
                os.write(handle, bytes(min(left, _BLOCK)))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                break
    finally:
        os.close(handle)
    return lambda: Path(ballast).unlink(missing_ok=True)


def exhaust_memory(pid: int, spare: int = 0) -> Callable[[], None]:
    """Let process ``pid`` take ``spare`` bytes of address space more; returns what lifts that.

    What it has already is not touched. Linux alone; needs the right to limit that process.
    """
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        soft, hard = resource.prlimit(pid, resource.RLIMIT_AS)
        limit = pages * os.sysconf("SC_PAGE_SIZE") + spare
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, hard))
    except (OSError, AttributeError) as error:
        raise ConfigError(f"the memory of process {pid} cannot be limited: {error}") from error

    def lift() -> None:
        with contextlib.suppress(ProcessLookupError):  # it has died meanwhile
            resource.prlimit(pid, resource.RLIMIT_AS, (soft, hard))

    return lift


@contextlib.contextmanager
def full_disk(directory: str | Path, spare: int = 0) -> Iterator[None]:
    """``fill_disk`` for the block."""
    empty = fill_disk(directory, spare)
    try:
        yield
    finally:
        empty()


@contextlib.contextmanager
def exhausted_memory(pid: int, spare: int = 0) -> Iterator[None]:
    """``exhaust_memory`` for the block."""
    lift = exhaust_memory(pid, spare)
    try:
        yield
    finally:
        lift()


def _free(directory: str | Path) -> int:
    stat = os.statvfs(directory)
    return stat.f_bavail * stat.f_frsize
