"""A reader that is behind gets the newest of each request, and every request's end."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from rollout.api.arrivals import Arrivals
from rollout.errors import EngineClosed


def snapshot(request_id, step):
    return SimpleNamespace(request_id=request_id, step=step)


def test_a_slow_reader_takes_the_newest_only():
    async def read():
        arrived = Arrivals()

        def engine():
            for step in range(100):
                arrived(snapshot("a", step))
                arrived(snapshot("b", step))

        thread = threading.Thread(target=engine)
        thread.start()
        thread.join()
        await asyncio.sleep(0)  # the loop takes over what came
        got = [await arrived.take(), await arrived.take()]
        assert not arrived._some.is_set()
        arrived(snapshot("a", 100))
        return [*got, await arrived.take()]

    got = asyncio.run(asyncio.wait_for(read(), 10))
    assert [(s.request_id, s.step) for s in got] == [("a", 99), ("b", 99), ("a", 100)]


def test_an_error_is_raised_at_once():
    async def read():
        arrived = Arrivals()
        arrived(snapshot("a", 1))
        arrived(EngineClosed("gone"))
        await asyncio.sleep(0)
        with pytest.raises(EngineClosed, match="gone"):
            await arrived.take()

    asyncio.run(asyncio.wait_for(read(), 10))
