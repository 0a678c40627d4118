"""What is asked of the engine's thread: at its deadline it has not begun, or it is the truth."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future

import pytest

from rollout.engine.deadline_future import DeadlineFuture
from rollout.errors import DeadlineExceeded


def begun() -> Future[str]:
    """As the engine's thread has it in hand."""
    future: Future[str] = Future()
    assert future.set_running_or_notify_cancel()
    return future


async def both_ways(asked: DeadlineFuture[str], how: str) -> str:
    return await asked if how == "task" else asked.result()


@pytest.mark.parametrize("how", ["thread", "task"])
async def test_what_ends_just_after_the_deadline_is_told_as_it_went(how) -> None:
    """A pause at its exact deadline was told as failed, and held."""
    future, undone = begun(), threading.Event()
    asked = DeadlineFuture(future, "pause", 1.5, undone.set)
    threading.Timer(1.6, future.set_result, ("done",)).start()
    assert await both_ways(asked, how) == "done"
    assert not undone.is_set()


@pytest.mark.parametrize("how", ["thread", "task"])
async def test_what_has_not_begun_at_the_deadline_never_will(how) -> None:
    future: Future[str] = Future()
    undone = threading.Event()
    with pytest.raises(DeadlineExceeded, match=r"pause did not end within 0\.05 s"):
        await both_ways(DeadlineFuture(future, "pause", 0.05, undone.set), how)
    assert undone.is_set()
    assert future.cancelled()


@pytest.mark.parametrize("how", ["thread", "task"])
async def test_what_never_ends_is_not_waited_for_for_ever(how) -> None:
    started, undone = time.monotonic(), threading.Event()
    with pytest.raises(DeadlineExceeded):
        await both_ways(DeadlineFuture(begun(), "sleep", 0.1, undone.set), how)
    assert undone.is_set()
    assert time.monotonic() - started < 20
