"""Where a front keeps its record whose engines end with it: a folder that goes with it, too."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollout.fleet.coordination.record import FILE

PREFIX = "rollout-record-"


@contextmanager
def record_folder() -> Iterator[str]:
    """A temporary folder for one record. Fronts that were killed have left theirs: these go now."""
    _remove_left()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    held = os.open(folder, os.O_DIRECTORY)
    try:
        with suppress(OSError):  # a file system without locks, where nothing is removed either
            fcntl.flock(held, fcntl.LOCK_EX)
        yield str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)


def _remove_left() -> None:
    """Whoever holds a lock lives: it goes with its process. A folder without a record in it may be
    one that is not locked yet; a link, or somebody else's, is none of ours.
    """
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            held = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(held).st_uid == os.geteuid() and (folder / FILE).exists():
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(held)
