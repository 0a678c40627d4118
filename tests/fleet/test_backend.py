"""What a front does with its members' streams, told from streams of which every step is known."""

import asyncio
from types import SimpleNamespace

import pytest

from rollout import Rollout
from rollout.errors import EngineClosed
from rollout.fleet.backend import FleetBackend
from rollout.fleet.call import FleetCall
from rollout.fleet.fleet import Link
from rollout.fleet.stats import summed
from rollout.generation import RequestOutput, SamplingParams

MEMBER = Link("m0", SimpleNamespace(), SimpleNamespace(), None)


def output(finished):
    return RequestOutput(
        request_id="a",
        prompt=None,
        prompt_token_ids=[1],
        outputs=[],
        finished=finished,
        prompt_logprobs=None,
        num_cached_tokens=0,
    )


class Call(FleetCall):
    """Of one prompt, whose outputs are those of ``stream``."""

    def outputs(self, client, rows):
        return self.stream


class Backend(FleetBackend):
    """Over one member that serves."""

    def __init__(self):
        standing = SimpleNamespace(waiting=0)
        super().__init__(
            SimpleNamespace(epoch=1, standings=lambda: {"m0": standing}, serving=lambda: [MEMBER])
        )

    async def _met(self, name):
        return MEMBER


def call(stream):
    return Call(prompts=[[1]], params=[SamplingParams()], request_ids=["a"], stream=stream)


def test_a_stream_that_breaks_behind_its_last_output_has_said_all():
    async def stream():
        yield 0, output(finished=True)
        raise EngineClosed("its connection is gone")

    async def course():
        return [each async for each in Backend()._spread(call(stream()))]

    [(row, last)] = asyncio.run(course())
    assert (row, last.finished) == (0, True)


def test_who_does_not_read_a_stream_finds_the_newest_output_alone():
    async def stream():
        for n in range(100):
            yield 0, output(finished=n == 99)
            await asyncio.sleep(0)

    async def course():
        backend = Backend()
        reading = backend._spread(call(stream()))
        first = await anext(reading)
        for _ in range(300):
            await asyncio.sleep(0)
        [queue] = backend._calls
        assert queue.qsize() <= 2
        return [first, *[each async for each in reading]]

    found = asyncio.run(course())
    assert len(found) <= 3
    assert found[-1][1].finished


def test_members_without_pins_add_up_to_none(front):
    rows = [front.rollout.metrics()] * 3
    assert rows[0].pinned_version == -1
    assert summed(rows).pinned_version == -1


def test_a_front_says_what_it_serves_without_asking_a_member(front, monkeypatch):
    front.rollout.generate([[1, 2, 3]], {"max_tokens": 1})  # by then members are known

    async def asked():
        raise AssertionError("clients ask before each of their calls")

    for link in front.fleet.links():
        monkeypatch.setattr(link.client, "server_info", asked)
    info = front.rollout.server_info()
    assert (info.epoch, info.version, info.state) == (front.fleet.epoch, 0, "running")
    assert info.max_model_len == 256
    with Rollout.connect(front.rollout.address) as client:
        assert client.generate([[1, 2, 3]], {"max_tokens": 2})[0].finished
    for name in front.names:
        front.fleet.remove(name)
    with pytest.raises(EngineClosed, match="no member of the fleet serves"):
        front.rollout.server_info()
