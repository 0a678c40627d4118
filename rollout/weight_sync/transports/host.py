"""Whether two processes share memory: a name for this boot, this shared-memory mount, this user."""

from __future__ import annotations

import hashlib
import os
from functools import cache
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_id() -> str:
    """Equal in two processes exactly where one can open the other's shared-memory files.

    A digest of the kernel's boot id, the device number of the mount at /dev/shm (a container with
    its own mount has another) and the user id. "" where there is no shared memory.
    """
    try:
        boot, mount = _text_of(_BOOT_ID), SHARED_MEMORY.stat()
    except OSError:
        return ""
    facts = f"{boot}/{mount.st_dev}/{mount.st_ino}/{os.geteuid()}"
    return hashlib.sha256(facts.encode()).hexdigest()[:32]


@cache
def _text_of(path: Path) -> str:
    """What never changes while this process lives."""
    return path.read_text().strip()
