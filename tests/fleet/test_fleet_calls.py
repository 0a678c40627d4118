"""What a front does with its members' streams, told from streams of which every step is known."""

import asyncio
import contextlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from time import sleep
from types import SimpleNamespace

import pytest
from shared_engines import eventually

from rollout import Rollout
from rollout.errors import EngineClosed
from rollout.fleet.calls.call import INTERVAL, FleetCall
from rollout.fleet.calls.calls import Calls
from rollout.fleet.calls.hold import Hold
from rollout.fleet.fronts.stats import summed
from rollout.fleet.link import Link
from rollout.generation import (
    Completion,
    ContinuedPrompt,
    Logprobs,
    RequestOutput,
    SamplingParams,
    VersionSpan,
)
from rollout.wire.version import FEATURES

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


class OfOne(Calls):
    """Over one member that serves."""

    def __init__(self):
        fleet = OneMember(lease=1.0)
        super().__init__(fleet, Hold(fleet))

    async def _met(self, name):
        return MEMBER


def call(stream):
    return Call(prompts=[[1]], params=[SamplingParams()], request_ids=["a"], stream=stream)


def test_a_stream_that_breaks_behind_its_last_output_has_said_all():
    async def stream():
        yield 0, output(finished=True)
        raise EngineClosed("its connection is gone")

    async def course():
        return [each async for each in OfOne().run(call(stream()))]

    [(row, last)] = asyncio.run(course())
    assert (row, last.finished) == (0, True)


def sample(count, version=0):
    logs = Logprobs(*([0.0] * count for _ in range(3)))
    return Completion(
        index=0, text="", token_ids=[7] * count, logprobs=logs, cumulative_logprob=0.0,
        finish_reason=None, stop_reason=None, weight_versions=(VersionSpan(version, 0, count),),
        kv_spans=(),
    )  # fmt: skip


class Asked:
    """A member's client, which notes what it is asked for."""

    features = FEATURES

    def generate(self, prompts, params, ids, *, stream, **said):
        self.prompts, self.stream = prompts, stream
        self.intervals = [one.stream_interval for one in params]


def unstreamed(*params):
    return FleetCall(
        prompts=[[1]] * len(params), params=[SamplingParams(**one) for one in params],
        request_ids=[str(n) for n in range(len(params))], stream=False,
    )  # fmt: skip


LONG = {"max_tokens": None}


def test_members_are_asked_to_tell_of_what_can_go_on_and_has_something_to_lose():
    client = Asked()
    for params, stream, intervals in (
        (({"max_tokens": INTERVAL + 1}, LONG), True, [INTERVAL] * 2),
        (({"max_tokens": INTERVAL},), False, None),
        (({**LONG, "prompt_logprobs": 0},), False, None),
        (({**LONG, "hidden_state": True},), False, None),
        (({**LONG, "structured_outputs": {"regex": "a*"}},), True, [INTERVAL]),
        (({**LONG, "return_routed_experts": True},), False, None),
        (({**LONG, "return_sampling_mask": True},), False, None),
        (({**LONG, "prompt_logprobs": 0}, LONG), True, [(1 << 63) - 1, INTERVAL]),
    ):
        unstreamed(*params).outputs(client, range(len(params)))
        assert client.stream == stream
        assert intervals in (None, client.intervals)
    client.features = tuple(name for name in FEATURES if name != "intervals")
    unstreamed(LONG).outputs(client, [0])
    assert not client.stream


def test_callers_of_what_is_not_streamed_get_whole_outputs_alone():
    async def stream():
        for count in (1, 65):
            yield 0, replace(output(finished=False), outputs=[sample(count)])
            await asyncio.sleep(0.01)  # in which it would be read
        yield 0, replace(output(finished=True), outputs=[sample(70)])

    async def course():
        made = call(False)
        made.outputs = lambda client, rows: stream()
        return [each async for each in OfOne().run(made)]

    [(row, last)] = asyncio.run(course())
    assert (row, last.finished, len(last.outputs[0].token_ids)) == (0, True, 70)


def test_what_may_not_mix_versions_begins_anew():
    client = Asked()
    told = replace(output(finished=False), outputs=[sample(65, version=3)])
    for params, live, goes_on in (
        (LONG, (1, 4, 0), True),
        (LONG, (1, 4, 3), True),
        (LONG, (1, 5, 4), False),
        ({**LONG, "pin": True}, (1, 3, 0), True),
        ({**LONG, "pin": True}, (1, 4, 0), False),
        (LONG, (2, 3, 0), False),
    ):
        made = unstreamed(params)
        made.delivered(0, told, 1)
        made.forget(*live)
        made.outputs(client, [0])
        [prompt] = client.prompts
        assert isinstance(prompt, ContinuedPrompt) == goes_on


class OfTwo(OfOne):
    """Each of two prompts on a member of its own."""

    def _shares(self, call, rows, without):
        return {"m0": [0], "m1": [1]}


def test_who_does_not_read_two_members_streams_finds_the_newest_outputs_alone():
    class Each(Call):
        def outputs(self, client, rows):
            return self.stream()

    async def stream():
        for n in range(100):
            yield 0, output(finished=n == 99)
            await asyncio.sleep(0)

    async def course():
        both = Each(
            prompts=[[1], [2]], params=[SamplingParams()] * 2, request_ids=["a", "b"], stream=stream
        )
        reading = OfTwo().run(both)
        first = await anext(reading)
        for _ in range(300):
            await asyncio.sleep(0)
        return [first, *[each async for each in reading]]

    found = asyncio.run(course())
    assert len(found) <= 5
    assert {row for row, last in found if last.finished} == {0, 1}


def test_a_call_that_waits_for_its_member_is_ended_with_an_error_and_cancelled_as_ever():
    async def stream():
        yield 0, output(finished=False)
        await asyncio.Event().wait()

    async def reading(calls):
        async for _ in calls.run(call(stream())):
            pass

    async def reading_on(calls):
        """In a task that somebody cancelled before, and that went on."""
        asyncio.current_task().cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        await reading(calls)

    async def course():
        calls = OfOne()
        tasks = [asyncio.create_task(each(calls)) for each in (reading, reading, reading_on)]
        while calls.running < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        tasks[0].cancel()
        calls.end(EngineClosed("the service was stopped"))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        at_rest = calls.run(call(stream()))
        await anext(at_rest)
        calls.end(EngineClosed("stopped while nobody waited"))
        with pytest.raises(EngineClosed, match="nobody waited"):
            await anext(at_rest)
        return ends, calls.running

    (cancelled, *ended), left = asyncio.run(asyncio.wait_for(course(), 30))
    assert isinstance(cancelled, asyncio.CancelledError)
    assert [type(each) for each in ended] == [EngineClosed] * 2
    assert left == 0


class OneMember:
    """A fleet of one that is out of service, or of another life, when its test says so."""

    epoch, version, parted = 1, 0, 0
    fleet_id = 0
    closed = False

    def __init__(self, lease):
        self.lease, self.member, self.born = lease, MEMBER, 1

    def serving(self):
        return [self.member] if self.member else []

    def standings(self):
        return {link.name: SimpleNamespace(waiting=0, kv_usage=0.0) for link in self.serving()}

    def life(self, name):
        return self.born

    def one(self):
        return self.member

    def out_for(self, seconds):
        self.member = None
        asyncio.get_running_loop().call_later(seconds, setattr, self, "member", MEMBER)


def finished_by(fleet, attempt):
    """How many attempts a call takes, of which each awaits ``attempt(n)`` before its output."""
    count = 0

    async def outputs():
        nonlocal count
        count += 1
        await attempt(count)
        yield 0, output(finished=True)

    class Attempts(FleetCall):
        def outputs(self, client, rows):
            return outputs()

    class Over(Calls):
        async def _met(self, name):
            return MEMBER

    made = Attempts(prompts=[[1]], params=[SamplingParams()], request_ids=["a"], stream=False)

    async def course():
        return [each async for each in Over(fleet, Hold(fleet)).run(made)]

    [(_, last)] = asyncio.run(course())
    assert last.finished
    return count


def test_each_outage_is_waited_for_on_its_own():
    fleet = OneMember(lease=0.6)

    async def attempt(n):
        if n == 2:
            await asyncio.sleep(2.2 * fleet.lease)  # beyond what the first one was waited for
        if n < 3:
            fleet.out_for(0.1)
            raise EngineClosed("its lease has run out")

    assert finished_by(fleet, attempt) == 3


@pytest.mark.parametrize("comes_back", ["in a new life", "after it was out of service"])
def test_a_lost_member_is_not_asked_again_while_it_only_seems_to_serve(comes_back):
    fleet = OneMember(lease=4.0)

    def back():
        is_back.append(True)
        if comes_back == "in a new life":
            fleet.born += 1
        else:
            fleet.out_for(fleet.lease / 4)

    async def attempt(n):
        if n == 1:
            asyncio.get_running_loop().call_later(0.6, back)
        if not is_back:
            raise EngineClosed("its connection is gone") from OSError("refused")

    is_back = []
    assert finished_by(fleet, attempt) == 2


def test_where_no_other_member_serves_a_call_says_so():
    with pytest.raises(EngineClosed, match="no other member"):
        OfOne()._shares(call(None), [0], {"m0"})


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

    async def newer():
        return replace(info, package_version="9")

    for link in front.fleet.links():
        monkeypatch.setattr(link.client, "server_info", newer)
    assert front.rollout.server_info().package_version == info.package_version
    front.fleet.remove(front.backend._said_by[0])
    assert front.rollout.server_info().package_version == "9"  # of one that is there
    for link in front.fleet.links():
        front.fleet.remove(link.name)
    assert front.rollout.server_info().state == "fenced"
    with pytest.raises(EngineClosed, match="no member of the fleet serves"):
        front.rollout.metrics()


def test_a_new_call_of_a_client_outlasts_a_moment_in_which_no_member_serves(front, monkeypatch):
    front.rollout.generate([[1, 2, 3]], {"max_tokens": 1})
    with Rollout.connect(front.rollout.address) as client, ThreadPoolExecutor(1) as pool:
        with monkeypatch.context() as out:
            out.setattr(front.fleet, "serving", list)
            out.setattr(front.fleet, "standings", dict)
            asked = pool.submit(client.generate, [[1, 2, 3]], {"max_tokens": 2})
            sleep(0.5)
            assert not asked.done()
        assert asked.result(60)[0].finished


def test_an_abort_ends_what_waits_at_the_front_for_a_member(front, monkeypatch):
    front.rollout.generate([[1, 2, 3]], {"max_tokens": 1})
    with ThreadPoolExecutor(1) as pool, monkeypatch.context() as out:
        out.setattr(front.fleet, "serving", list)
        out.setattr(front.fleet, "standings", dict)
        out.setattr(Calls, "_patience", float("inf"))
        both = {"max_tokens": 6, "n": 2}
        asked = pool.submit(front.rollout.generate, [[5, 6], "hello"], both, request_ids="R1")
        eventually(lambda: front.backend.calls.running == 1)
        assert front.rollout.abort("R2") == 0
        assert front.rollout.abort("R1") == 2
        outputs = asked.result(60)
    assert [(one.prompt, one.prompt_token_ids) for one in outputs] == [
        (None, [5, 6]),
        ("hello", []),
    ]
    samples = [sample for one in outputs for sample in one.outputs]
    assert [(one.finish_reason, one.token_ids) for one in samples] == [("abort", [])] * 4
    assert {one.epoch for one in outputs} == {front.fleet.epoch}


def test_what_was_delivered_stays_of_a_call_that_is_aborted_between_two_members():
    begun = replace(output(finished=False), outputs=[sample(4)])
    calls = OfOne()

    async def stream():
        yield 0, begun
        calls._fleet.member = None
        asyncio.get_running_loop().call_later(0.1, calls.abort, ["a"])
        raise EngineClosed("its process was killed")

    async def course():
        made = call(stream())
        return [last async for _, last in calls.run(made)], made.placed

    (first, last), placed = asyncio.run(asyncio.wait_for(course(), 30))
    assert not first.finished
    assert last.finished
    [cut] = last.outputs
    assert (cut.finish_reason, cut.token_ids) == ("abort", first.outputs[0].token_ids)
    assert not placed


def test_an_abort_at_the_front_ends_what_waits_for_a_version_at_members(front, engines):
    later = {"max_tokens": 6, "min_version": 1}
    with ThreadPoolExecutor(1) as pool:
        prompts = [[5, 6, n] for n in range(6)]
        asked = pool.submit(front.rollout.generate, prompts, later, request_ids="late")
        eventually(lambda: sum(engine.metrics().waiting for engine in engines) == len(prompts))
        assert front.rollout.abort("late") == len(prompts)
        outputs = [output.outputs[0] for output in asked.result(60)]
    assert {(one.finish_reason, len(one.token_ids)) for one in outputs} == {("abort", 0)}
