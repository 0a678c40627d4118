"""Python's own pauses: waits of threads for each other, and searches for garbage."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SWITCH_INTERVAL = 0.0005  # seconds that a step waits at most for Python of another thread
# Objects between searches for garbage. With Python's 700 a step of 256 streams was searched several
# times while nothing of it was garbage, at a sixth of a front's processor time.
_YOUNG = 50_000

_lock = threading.Lock()
_inside, _before = 0, 0.0


@contextmanager
def quick_switches() -> Iterator[None]:
    """Meanwhile threads of this process wait for each other no longer than ``SWITCH_INTERVAL``.

    For what hands work from thread to thread beside others that compute, in a process that is not
    ours to set up; any number at a time.
    """
    global _inside, _before
    with _lock:
        if not _inside:
            _before = sys.getswitchinterval()
            sys.setswitchinterval(min(_before, SWITCH_INTERVAL))
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                sys.setswitchinterval(_before)


def settle() -> None:
    """In a process of ours, once it serves: what is loaded stays, and searches for garbage pass it
    over, which held up everything for 0.1 s.
    """
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG)
