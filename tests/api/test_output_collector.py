"""A reader that is behind gets the newest of each request, and every request's end."""

import asyncio
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.api.loop_thread import LoopThread
from rollout.api.output_collector import RequestOutputCollector
from rollout.distributed.wakeup import Wakeup
from rollout.errors import EngineClosed


def snapshot(request_id, step):
    return SimpleNamespace(request_id=request_id, step=step)


def test_a_slow_reader_takes_the_newest_only():
    async def read():
        arrived = RequestOutputCollector()

        def engine():
            for step in range(100):
                arrived(snapshot("a", step))
                arrived(snapshot("b", step))

        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
        await asyncio.sleep(0)  # the loop takes over what came
        got = [await arrived.take(), await arrived.take()]
        assert not arrived._newest
        arrived(snapshot("a", 100))
        return [*got, await arrived.take()]

    got = asyncio.run(asyncio.wait_for(read(), 10))
    assert [(s.request_id, s.step) for s in got] == [("a", 99), ("b", 99), ("a", 100)]


def test_an_error_is_raised_at_once():
    async def read():
        arrived = RequestOutputCollector()
        arrived(snapshot("a", 1))
        arrived(EngineClosed("gone"))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="gone"):
            await arrived.take()

    asyncio.run(asyncio.wait_for(read(), 10))


def test_a_reader_that_was_cancelled_while_it_waited_leaves_the_rest_to_the_next():
    async def read():
        arrived = RequestOutputCollector()
        gone = asyncio.create_task(arrived.take())
        await asyncio.sleep(0)
        gone.cancel()
        arrived.put(snapshot("a", 1))  # before the cancelled one has ended
        next_one = asyncio.create_task(arrived.take())
        assert (await next_one).step == 1
        waits = asyncio.create_task(arrived.take())
        await asyncio.sleep(0)
        arrived.put(snapshot("a", 2))
        arrived.put(snapshot("a", 3))  # woken once; it gets the newest
        assert (await waits).step == 3
        assert gone.cancelled()

    asyncio.run(asyncio.wait_for(read(), 10))


def test_a_wakeup_is_of_who_waits_and_not_remembered():
    async def wait():
        wakeup = Wakeup()
        wakeup.wake()
        waited = wakeup.next()
        assert not waited.done()
        wakeup.wake()
        wakeup.wake()
        await waited
        later = wakeup.next()
        later.cancel()
        wakeup.wake()
        assert later.cancelled()

    asyncio.run(asyncio.wait_for(wait(), 10))


def test_a_call_that_comes_with_the_end_of_its_loop_is_told_so() -> None:
    thread = LoopThread()
    ends, came = threading.Event(), threading.Event()
    schedule = thread._loop.call_soon_threadsafe

    def end() -> None:
        thread._loop.stop()
        ends.set()
        assert came.wait(30)  # for the call below

    def scheduled(*args: Any, **kwargs: Any) -> Any:
        handle = schedule(*args, **kwargs)
        came.set()
        return handle

    schedule(end)
    assert ends.wait(30)
    thread._loop.call_soon_threadsafe = scheduled
    started = time.monotonic()
    with pytest.raises(EngineClosed, match="shut down"):
        thread.run(asyncio.sleep(60))
    assert time.monotonic() - started < 30
    thread.close()


def test_an_interrupt_while_a_call_is_handed_over_ends_it() -> None:
    thread = LoopThread()
    ended = threading.Event()
    schedule = thread._loop.call_soon_threadsafe

    async def call() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        thread._loop.call_soon_threadsafe = schedule
        schedule(*args, **kwargs)
        time.sleep(0.2)  # it has begun
        raise KeyboardInterrupt

    thread._loop.call_soon_threadsafe = interrupted
    with pytest.raises(KeyboardInterrupt):
        thread.run(call())
    assert ended.wait(30)
    thread.close()


def test_a_forked_process_is_told_that_its_parent_has_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    thread = LoopThread()
    thread.close()  # as in a child, which has no thread of its parent's
    with pytest.raises(EngineClosed, match="was shut down; make a new one"):
        thread.run(asyncio.sleep(0))
    parent = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: parent + 1)
    with pytest.raises(EngineClosed, match="forked from the one that made this Rollout"):
        thread.run(asyncio.sleep(0))
