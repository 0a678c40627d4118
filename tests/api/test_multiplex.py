"""Streamed calls of one client share a stream to the service, and say what they would alone."""

import asyncio
import gc
from contextlib import aclosing
from dataclasses import replace

import pytest
from proxies import Proxy
from shared_engines import eventually

from rollout import AsyncRollout
from rollout.errors import EngineClosed, InvalidRequest, TransferFailed
from rollout.generation import RequestOutput, SamplingParams, VersionSpan
from rollout.rpc import client as rpc_client
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.convert import params_to_proto, prompt_to_proto
from rollout.rpc.growth import Cumulative, GrownRows, added, grown_rows
from rollout.rpc.multiplex import Multiplex, read_ahead
from rollout.server.grpc import multiplex
from rollout.server.grpc.multiplex import MESSAGE, Multiplexed

ASKED = (
    {"max_tokens": 24, "temperature": 0.0},
    {"max_tokens": 24, "seed": 3, "n": 2, "logprobs": 2},
    {"max_tokens": 12, "seed": 4, "prompt_logprobs": 1},
    {"max_tokens": 12, "seed": 5, "return_sampling_mask": True, "top_k": 5},
    {"max_tokens": 24, "seed": 6, "stop": [" "]},
    {"max_tokens": 1, "temperature": 0.0},
)
LONG = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}


def course(address, work, limit=60.0):
    async def run():
        client = AsyncRollout.connect(address, timeout=10)
        try:
            await client.start()
            return await work(client)
        finally:
            await client.shutdown()

    return asyncio.run(asyncio.wait_for(run(), limit))


async def streamed(client, prompt, params):
    return [output async for output in client.stream(prompt, params)]


def test_a_shared_stream_brings_what_calls_of_their_own_bring(engine):
    async def one(client, number):
        await client.reset_prefix_cache()  # the same bits need the same prefill
        return await streamed(client, f"prompt {number}", ASKED[number])

    async def work(client):
        shared = [await one(client, number) for number in range(len(ASKED))]
        client.backend.features = ()
        return shared, [await one(client, number) for number in range(len(ASKED))]

    for many, alone in zip(*course(engine.address, work), strict=True):
        last = many[-1]
        assert last == replace(alone[-1], request_id=last.request_id)
        for output in many:
            for part, whole in zip(output.outputs, last.outputs, strict=True):
                count = len(part.token_ids)
                assert part.token_ids == whole.token_ids[:count]
                assert part.logprobs.raw == whole.logprobs.raw[:count]
                assert whole.text.startswith(part.text)
            assert output.prompt_token_ids == last.prompt_token_ids


def test_a_stream_of_an_interval_brings_fewer_outputs_and_the_same_last(engine, monkeypatch):
    """Also in a stream of its own, as a large call has, and from a service that knows none."""
    params = {**LONG, "max_tokens": 40, "logprobs": 1}
    some = {**params, "stream_interval": 16}

    async def one(client, params):
        await client.reset_prefix_cache()  # the same bits need the same prefill
        outputs = await streamed(client, "prompt", params)
        return {len(o.outputs[0].token_ids) for o in outputs}, outputs[-1]

    async def work(client):
        found = [await one(client, params), await one(client, some)]
        with monkeypatch.context() as large:
            large.setattr(rpc_client, "SHARED", 0)
            large.setattr(client.backend, "_multiplex", None)
            found.append(await one(client, some))
        backend, newer = client.backend, client.backend.features
        backend.features = tuple(name for name in newer if name != "intervals")
        asked = SamplingParams.from_dict(some)
        assert backend._known([asked]) == [SamplingParams.from_dict(params)]
        return [*found, await one(client, some)]

    (_, last), *fewer, _ = found = course(engine.address, work)
    for told, _ in fewer:
        assert told <= {1, 17, 33, 40}
    for _, other in found:
        assert replace(other, request_id=last.request_id) == last


def test_a_request_that_is_too_large_is_refused_with_a_remedy_and_leaves_no_task(engine):
    async def work(client):
        await streamed(client, [1, 2], ASKED[0])
        before = asyncio.all_tasks()
        with pytest.raises(InvalidRequest, match=r"larger than max .* its --max-body-bytes"):
            await streamed(client, "a" * (65 << 20), ASKED[0])
        for _ in range(500):
            if asyncio.all_tasks() <= before:
                return True
            await asyncio.sleep(0.01)
        return asyncio.all_tasks() - before

    assert course(engine.address, work) is True


def test_calls_of_one_moment_share_a_stream_which_ends_with_the_last(engine):
    async def work(client):
        opened, method = [], client.backend._multiplexed
        client.backend._multiplex._open = lambda sent: opened.append(method(sent)) or opened[-1]
        calls = [streamed(client, [n, 2, 3], {**LONG, "max_tokens": 16}) for n in range(1, 9)]
        await asyncio.gather(*calls)
        [stream] = opened
        await stream.code()  # the service has ended it, too
        return stream.done()

    assert course(engine.address, work)


def test_who_reads_slowly_holds_back_nobody_and_finds_the_newest(engine):
    async def work(client):
        slow = client.stream([1, 2, 3], LONG)
        async with aclosing(slow):
            first = await anext(slow)
            others = [streamed(client, [n, 5, 6], LONG) for n in range(1, 5)]
            ended = [len(each[-1].outputs[0].token_ids) for each in await asyncio.gather(*others)]
            first.outputs[0].token_ids.append(-1)  # its lists are the reader's
            rest = [output async for output in slow]
        return ended, rest

    ended, rest = course(engine.address, work)
    assert ended == [200] * 4
    assert len(rest) < 100
    assert len(rest[-1].outputs[0].token_ids) == 200
    assert -1 not in rest[-1].outputs[0].token_ids


def test_a_stream_of_a_calls_own_is_read_ahead_of_its_reader_and_closed_with_it():
    closed = []
    nothing = RequestOutput(
        request_id="a", prompt=None, prompt_token_ids=[], prompt_logprobs=None, outputs=[],
        finished=False, num_cached_tokens=0,
    )  # fmt: skip

    async def stream(count, error=None):
        try:
            for n in range(count):
                yield 0, replace(nothing, num_cached_tokens=n)
                await asyncio.sleep(0)
            if error is not None:
                raise error
        finally:
            closed.append(count)

    async def course():
        outputs = read_ahead(stream(100))
        found = [await anext(outputs)]
        for _ in range(300):
            await asyncio.sleep(0)
        found += [each async for each in outputs]
        async with aclosing(read_ahead(stream(1 << 20))) as left_early:
            await anext(left_early)
        failing = read_ahead(stream(2, InvalidRequest("no")))
        with pytest.raises(InvalidRequest, match="no"):
            async for _ in failing:
                pass
        return found

    assert len(found := asyncio.run(asyncio.wait_for(course(), 30))) <= 3
    assert found[-1][1].num_cached_tokens == 99
    assert closed == [100, 1 << 20, 2]


def test_a_client_that_has_streamed_keeps_no_connection_once_it_is_closed(engine):
    """Also where somebody holds it, and nothing looks for garbage."""

    async def work(client):
        await streamed(client, "prompt", ASKED[0])
        async with aclosing(client.stream("prompt", LONG)) as left:
            await anext(left)
        return client

    gc.disable()
    try:
        with Proxy(engine.address) as proxy:
            held = course(proxy.address, work)
            eventually(lambda: proxy.num_open == 0)
    finally:
        gc.enable()
    assert "shut down" in repr(held)


def test_who_leaves_ends_its_own_call_and_an_error_is_one_calls_own(engine):
    async def work(client):
        other = asyncio.ensure_future(streamed(client, [7, 8, 9], LONG))
        leaving = client.stream([1, 2, 3], {**LONG, "max_tokens": 400})
        async with aclosing(leaving):
            await anext(leaving)
        with pytest.raises(InvalidRequest, match="vocabulary"):
            await streamed(client, [10**8], LONG)
        return (await other)[-1].outputs[0].token_ids

    eventually(lambda: engine.metrics().running == 0, 20)  # of clients that have left before
    before = engine.metrics().requests_finished.get("abort", 0)
    assert len(course(engine.address, work)) == 200
    eventually(lambda: engine.metrics().running == 0, 20)
    assert engine.metrics().requests_finished["abort"] == before + 1


def test_a_connection_that_breaks_ends_all_its_calls_and_the_next_is_another(engine):
    async def work(client, proxy):
        calls = [asyncio.ensure_future(streamed(client, [n, 2], LONG)) for n in range(1, 4)]
        await asyncio.sleep(0.05)
        proxy._cuts.append(proxy.up)  # with the next bytes
        calls.append(asyncio.ensure_future(streamed(client, [4, 2], LONG)))
        ended = await asyncio.gather(*calls, return_exceptions=True)
        return ended, (await streamed(client, [1, 2], LONG))[-1].finished

    with Proxy(engine.address) as proxy:
        ended, finished = course(proxy.address, lambda client: work(client, proxy))
    assert finished
    assert all(isinstance(each, EngineClosed | list) for each in ended)
    assert any(isinstance(each, EngineClosed) for each in ended)
    eventually(lambda: engine.metrics().running == 0, 20)


def test_a_stream_that_is_closed_before_it_was_read_ends_its_calls_and_takes_no_more():
    async def course():
        opened = []

        class Opened:
            def __init__(self, sent):
                self.cancelled = False
                opened.append(self)

            def cancel(self):
                self.cancelled = True

            async def __aiter__(self):
                await asyncio.Event().wait()
                yield

        async def first(shared):
            async for _ in shared.outputs(cancel=pb.Done()):
                pass

        shared = Multiplex(Opened, lambda error: error, lambda output: None)
        for count in (1, 2):
            call = asyncio.create_task(first(shared))
            closing = asyncio.create_task(shared.close())  # in the tick that begins the call
            with pytest.raises(EngineClosed, match="connection was closed"):
                await call
            await closing
            assert [one.cancelled for one in opened] == [True] * count

    asyncio.run(asyncio.wait_for(course(), 30))


def test_nothing_is_kept_of_a_call_that_is_cancelled_between_two_messages(engine):
    output = engine.generate([[1, 2, 3]], {"max_tokens": 1})[0]
    large = replace(output, prompt="x" * MESSAGE)
    shared = Multiplexed({})
    shared._calls = {1: None, 2: None}
    shared._newest = {(1, 0): large, (2, 0): large}
    messages = shared._messages()
    assert [one.call for one in next(messages).outputs] == [1]
    del shared._calls[2]
    shared._forget(2)
    assert list(messages) == []
    assert list(shared._sent) == [1]


def test_who_reads_no_answers_begins_no_calls_for_good_and_who_reads_them_gets_all(monkeypatch):
    monkeypatch.setattr(multiplex, "UNSENT", 8)
    sent = []

    async def nothing(request):
        return
        yield

    async def commands():
        for number in range(100):
            sent.append(number)
            yield pb.MultiplexRequest(call=number, generate=pb.GenerateRequest())
            await asyncio.sleep(0)

    async def course():
        answers = Multiplexed({"generate": nothing}).answers(commands())
        ended = [end.call for end in (await anext(answers)).ended]
        for _ in range(1000):
            await asyncio.sleep(0)
        read_ahead = len(sent) - len(ended)
        async for message in answers:
            ended += [end.call for end in message.ended]
        return read_ahead, ended

    read_ahead, ended = asyncio.run(asyncio.wait_for(course(), 30))
    assert read_ahead <= 10
    assert sorted(ended) == list(range(100))


def test_what_outputs_add_makes_them_again(engine):
    outputs = list(engine.stream("a text", {"max_tokens": 20, "n": 2, "logprobs": 1, "seed": 8}))
    row, before = Cumulative(outputs[0]), outputs[0]
    for now in outputs[1:]:
        more = added(before, now)
        assert sum(len(one.token_ids) for one in more.outputs) <= 2 * len(outputs)
        assert more.prompt_token_ids == []
        row.add(more)
        assert row.output() == now
        before = now
    shorter = replace(before, outputs=[replace(one, text="") for one in before.outputs])
    assert added(before, shorter) is None


def cut(output, count):
    """As ``output`` stood after ``count`` tokens."""
    [one] = output.outputs
    logs = one.logprobs
    part = replace(
        one, token_ids=one.token_ids[:count], text=one.text[: 2 * count], finish_reason=None,
        logprobs=replace(
            logs, raw=logs.raw[:count], processed=logs.processed[:count],
            log_kept_mass=logs.log_kept_mass[:count],
        ),
        cumulative_logprob=sum(logs.processed[:count]),
        weight_versions=tuple(VersionSpan(s.version, 0, count) for s in one.weight_versions),
        kv_spans=tuple(VersionSpan(s.version, 0, 5 + count) for s in one.kv_spans),
    )  # fmt: skip
    return replace(output, outputs=[part], finished=False)


@pytest.fixture(scope="module")
def whole(engine):
    return engine.generate("a text", {"max_tokens": 20, "temperature": 0.0, "ignore_eos": True})[0]


def test_rows_that_only_have_more_tokens_are_columns_which_make_them_again(whole):
    counts = (1, 2, 2, 5, 13)
    before = cut(whole, 1)
    row = Cumulative(before)
    for count in counts:
        now, rows = cut(whole, count), GrownRows()
        assert rows.add(3, 1, before, now)
        [(call, index, more)] = grown_rows(rows.message())
        assert (call, index) == (3, 1)
        row.grow(more)
        assert row.output() == now
        before = now
    assert not GrownRows().add(3, 1, before, whole)  # it has finished
    row.add(added(before, whole))
    assert row.output() == whole
    assert GrownRows().message() is None


def test_what_is_more_than_tokens_is_no_column(whole):
    first, second = cut(whole, 2), cut(whole, 3)
    [one] = second.outputs

    def goes(**changed):
        new = replace(second, outputs=[replace(one, **changed)])
        return GrownRows().add(0, 0, first, new)

    *_, last = one.weight_versions
    assert goes()
    assert not goes(finish_reason="length")
    assert not goes(staleness=1)
    assert not goes(adapter="other@2")
    assert not goes(text="")
    assert not goes(logprobs=replace(one.logprobs, top=[{}] * len(one.token_ids)))
    for spans in ((*one.weight_versions, VersionSpan(9, last.stop, last.stop + 1)), ()):
        assert not goes(weight_versions=spans)
        assert not goes(kv_spans=spans)
    assert not GrownRows().add(0, 0, first, replace(second, epoch=1))
    assert not GrownRows().add(0, 0, first, replace(second, finished=True))
    assert not GrownRows().add(0, 0, first, replace(second, hidden_state=[1.0]))
    two = replace(first, outputs=first.outputs * 2), replace(second, outputs=second.outputs * 2)
    assert not GrownRows().add(0, 0, *two)


def test_columns_that_do_not_fit_are_refused(whole):
    first, second = cut(whole, 2), cut(whole, 3)
    rows = GrownRows()
    assert rows.add(0, 0, first, second)
    for name in ("calls", "texts", "counts", "token_ids", "raw", "log_kept_mass"):
        message = pb.Grown()
        message.CopyFrom(rows.message())
        del getattr(message, name)[:]
        with pytest.raises(TransferFailed, match="do not fit"):
            list(grown_rows(message))
    [(_, _, more)] = grown_rows(rows.message())
    with pytest.raises(TransferFailed, match="several samples"):
        Cumulative(replace(first, outputs=first.outputs * 2)).grow(more)
    bare = replace(first, outputs=[replace(first.outputs[0], kv_spans=())])
    with pytest.raises(TransferFailed, match="without spans"):
        Cumulative(bare).grow(more)


@pytest.mark.parametrize("grown", [False, True])
def test_columns_come_to_who_reads_them_alone(engine, grown):
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)

    async def work(client):
        ended = asyncio.Event()

        async def commands():
            for call in range(4):
                request = pb.GenerateRequest(
                    prompts=[prompt_to_proto([call + 1, 2, 3], f"columns {call}")],
                    params=[params_to_proto(params)], stream=True,
                )  # fmt: skip
                yield pb.MultiplexRequest(call=call, generate=request, grown=grown)
            await ended.wait()

        found, calls = [], set(range(4))
        async for message in client.backend._multiplexed(commands()):
            found.append(message)
            calls -= {end.call for end in message.ended}
            if not calls:
                ended.set()
        return found

    messages = course(engine.address, work)
    columns = sum(sum(message.grown.counts) for message in messages)
    assert any(message.HasField("grown") for message in messages) == grown
    whole = sum(len(c.token_ids) for m in messages for o in m.outputs for c in o.output.outputs)
    assert whole + columns == 4 * 24
