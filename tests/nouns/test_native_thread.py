"""Threads inside native code do not end the program by a signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

# Waits in C++ without the GIL, and comes back while the interpreter ends, which takes a while.
SCRIPT = """
import threading, time
from datetime import timedelta
import torch.distributed as dist
from rollout.distributed import native_thread

class Slow:
    sleep = time.sleep
    def __del__(self):
        self.sleep(2.0)

def stuck():
    inside.set()
    dist.HashStore().wait(["never"], timedelta(seconds=1.0))

native_thread._EXIT_WAIT = 0.1
inside = threading.Event()
{start}
inside.wait()
slow = Slow()
"""
ENDS = """
import atexit, ctypes
native_thread._END_LIMIT = 1
native_thread.NativeThread("stuck", stuck).start()
atexit.register(ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev)
atexit.register(native_thread.hang_instead_of_terminate)
"""
LEFT = 'native_thread.NativeThread("stuck", stuck).start()'
STOPPED = """
over = threading.Event()
def work():
    inside.set()
    over.wait()
    print("stopped")
native_thread.NativeThread("works", work, over.set).start()
"""
INTERRUPTED = """
def interrupted(*args, **given):
    raise KeyboardInterrupt
name = next(n for n in ("_start_joinable_thread", "_start_new_thread") if hasattr(threading, n))
begin = getattr(threading, name)
setattr(threading, name, interrupted)
try:
    native_thread.NativeThread("never begun", stuck).start()
except KeyboardInterrupt:
    inside.set()
setattr(threading, name, begin)
"""
BEGINNING = """
import atexit
thread = native_thread.NativeThread("begins", stuck)
thread._ident = 1  # the first that the new thread itself does
atexit.register(thread._end)
inside.set()
"""


def run(start: str) -> subprocess.CompletedProcess[str]:
    script = textwrap.dedent(SCRIPT).format(start=start)
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=90, check=False
    )


def test_one_that_cannot_be_stopped_is_left_where_it_is() -> None:
    done = run(LEFT)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_that_can_be_is_stopped() -> None:
    done = run(STOPPED)
    assert (done.returncode, done.stdout) == (0, "stopped\n"), done.stderr


def test_a_main_thread_that_c_plus_plus_ends_does_not_wait_for_ever() -> None:
    assert run(ENDS).returncode == -signal.SIGALRM


def test_one_that_ctrl_c_kept_from_beginning_is_not_waited_for() -> None:
    done = run(INTERRUPTED)
    assert (done.returncode, done.stderr) == (0, "")


def test_one_that_begins_as_the_program_ends_is_not_waited_for() -> None:
    done = run(BEGINNING)
    assert (done.returncode, done.stderr) == (0, "")
