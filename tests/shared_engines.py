"""Engines that tests share: streams that stand still in one, and how a test has to leave it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from rollout import Rollout

T = TypeVar("T")
LIMIT = 30.0  # s in which an update ends whose sender has gone
TRIES = 40  # of a stream that is paused between its first token and its last


def standing_still(
    begin: Callable[[], T],
    rollout: Rollout,
    running: int,
    pause: Callable[[], object] | None = None,
) -> T:
    """What ``begin`` returns, which has streams begin in ``rollout`` and sees their first tokens.

    Generation is paused then, by ``pause``, with ``running`` sequences or more in it. A machine may
    stop a test for longer than a tiny model takes for all its tokens: then once more.
    """
    for _ in range(TRIES):
        begun = begin()
        pause() if pause else rollout.pause_generation("keep")
        if rollout.metrics().running >= running:
            return begun
        rollout.resume_generation()
        rollout.abort()
        eventually(lambda: not rollout.metrics().running)
    raise AssertionError(f"{TRIES} times the streams were over before they could be paused")


def eventually(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait until ``condition()`` holds; fail when it does not within ``seconds``, a hang."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s"
        time.sleep(0.01)


def left_serving(test: str, rollout: Any) -> Iterator[None]:
    """Of an autouse fixture: a test that leaves the engine it shares paused, asleep or within an
    update fails by its name, and those after it find the engine serving all the same.
    """
    yield
    if not isinstance(rollout, Rollout):  # none, or an ``AsyncRollout`` of the test's file
        return
    state, deadline = rollout.metrics().state, time.monotonic() + LIMIT
    if state == "asleep":
        rollout.wake_up()
    if state in ("asleep", "paused"):
        rollout.resume_generation()
    while (update := rollout.weight_info().state) not in ("idle", "broken"):
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    assert (state, update) == ("running", "idle"), f"{test} left it {state}, its update {update}"
