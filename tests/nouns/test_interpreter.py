"""Python's own settings, changed for a while and put back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator

import pytest

from rollout.distributed import interpreter
from rollout.distributed.interpreter import SWITCH_INTERVAL, quick_switches

USUAL = 0.005  # seconds: Python's own


@pytest.fixture(autouse=True)
def usual(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of its own: other tests' services and updates may go on beside these."""
    before = sys.getswitchinterval()
    monkeypatch.setattr(interpreter, "_inside", 0)
    sys.setswitchinterval(USUAL)
    yield
    sys.setswitchinterval(before)


def test_threads_wait_less_for_each_other_until_the_last_one_has_ended() -> None:
    go, inside = threading.Event(), threading.Event()

    def beside() -> None:
        with quick_switches():
            inside.set()
            go.wait(20)

    other = threading.Thread(target=beside)
    with quick_switches():
        other.start()
        assert inside.wait(20)
    assert sys.getswitchinterval() == SWITCH_INTERVAL
    go.set()
    other.join()
    assert sys.getswitchinterval() == USUAL


def test_an_interval_that_is_shorter_already_is_left_alone() -> None:
    sys.setswitchinterval(SWITCH_INTERVAL / 2)
    with quick_switches():
        assert sys.getswitchinterval() == SWITCH_INTERVAL / 2
    assert sys.getswitchinterval() == SWITCH_INTERVAL / 2
