"""Python's own settings, changed for a while and put back."""

from __future__ import annotations

import sys
import threading

from rollout.distributed.interpreter import SWITCH_INTERVAL, quick_switches


def test_threads_wait_less_for_each_other_until_the_last_one_has_ended() -> None:
    before = sys.getswitchinterval()
    assert before > SWITCH_INTERVAL
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
    assert sys.getswitchinterval() == before


def test_an_interval_that_is_shorter_already_is_left_alone() -> None:
    before = sys.getswitchinterval()
    try:
        sys.setswitchinterval(SWITCH_INTERVAL / 2)
        with quick_switches():
            assert sys.getswitchinterval() == SWITCH_INTERVAL / 2
        assert sys.getswitchinterval() == SWITCH_INTERVAL / 2
    finally:
        sys.setswitchinterval(before)
