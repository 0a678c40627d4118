"""Members that are told to end, or are let go: what runs there ends, or goes on elsewhere."""

import asyncio
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from fleet_front import front_process
from serving import serve
from shared_engines import eventually
from test_processes import members, wait_serving

from rollout import AsyncRollout, Rollout
from rollout.errors import ConfigError, EngineClosed

pytestmark = pytest.mark.more
FLAGS = ("--num-kv-blocks", "128", "--max-model-len", "256")
LONG = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7, n] for n in range(8)]


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def row(address, name):
    return next(row for row in members(address) if row["name"] == name)


async def streamed(address, began):
    """All prompts' tokens by streams of their own, each of which only ever grows; ``began`` is
    called once all have begun.
    """
    async with AsyncRollout.connect(address) as client:
        first = [asyncio.Event() for _ in PROMPTS]

        async def one(number):
            before = []
            async for output in client.stream(PROMPTS[number], LONG):
                found = output.outputs[0].token_ids
                assert found[: len(before)] == before
                before = found
                first[number].set()
            return before

        async def tell():
            await asyncio.gather(*(event.wait() for event in first))
            await began(client)

        *found, _ = await asyncio.gather(*map(one, range(len(PROMPTS))), tell())
        return found


async def until_refused(client):
    while True:
        await client.generate([1], {"max_tokens": 1})


def test_a_member_that_gets_sigterm_leaves_and_no_stream_loses_a_token(
    checkpoint, trained, tmp_path
):
    with (
        serve(checkpoint, *FLAGS) as one,
        serve(checkpoint, *FLAGS) as two,
        front_process(tmp_path / "record", one.grpc, two.grpc) as front,
        Rollout.connect(front.grpc) as client,
    ):
        wait_serving(front.http, 2)
        expected = tokens(client.generate(PROMPTS, LONG))

        async def told_to_end(_):
            two.process.send_signal(signal.SIGTERM)

        assert asyncio.run(streamed(front.grpc, told_to_end)) == expected
        assert two.process.wait(60) == 0
        assert row(front.http, two.grpc)["status"] == "left"
        assert tokens(client.generate(PROMPTS, LONG)) == expected
        receipt = client.update_weights(trained, timeout=20)
        assert receipt.details["members"] == {one.grpc: "committed", two.grpc: "left"}

        port = two.grpc.rpartition(":")[2]  # as a pod comes back under its name
        with serve(checkpoint, *FLAGS, "--grpc-port", port, "--shutdown-timeout", "1") as again:
            wait_serving(front.http, 2)
            expected = tokens(client.generate(PROMPTS, LONG))

            async def held_and_told_to_end(async_client):
                """Nothing can end while all are paused: it is the timeout that does."""
                await async_client.pause_generation("keep")
                again.process.send_signal(signal.SIGTERM)
                assert await asyncio.to_thread(again.process.wait, 60) == 0
                await async_client.resume_generation()

            assert asyncio.run(streamed(front.grpc, held_and_told_to_end)) == expected
            assert row(front.http, two.grpc)["status"] == "left"


def test_an_engine_alone_ends_its_requests_where_it_is_told_for_how_long(checkpoint):
    with serve(checkpoint, *FLAGS, "--shutdown-timeout", "60") as served:
        with Rollout.connect(served.grpc) as client:
            expected = tokens(client.generate(PROMPTS, LONG))

            async def told_to_end(other):
                served.process.send_signal(signal.SIGTERM)
                with pytest.raises(EngineClosed, match="takes no new requests"):
                    await until_refused(other)

            assert asyncio.run(streamed(served.grpc, told_to_end)) == expected
        assert served.process.wait(30) == 0
    with (
        serve(checkpoint, *FLAGS, "--shutdown-timeout", "60") as served,
        Rollout.connect(served.grpc) as client,
        closing(client.stream([1, 2], LONG)) as stream,
    ):
        next(stream)
        client.pause_generation("keep")
        begun = time.monotonic()
        for _ in range(2):
            served.process.send_signal(signal.SIGTERM)
            time.sleep(0.3)
        assert served.process.wait(30) == 0
        assert time.monotonic() - begun < 30


def test_an_engine_that_ends_at_once_takes_nothing_new_meanwhile(checkpoint, trained):
    """Neither requests, which it would not finish, nor weights, which would be lost with it."""
    with serve(checkpoint, *FLAGS) as served, Rollout.connect(served.grpc) as client:
        with closing(client.stream([1, 2], LONG)) as stream:
            next(stream)
            served.process.send_signal(signal.SIGINT)
            with pytest.raises(EngineClosed):
                list(stream)
        for verb in (lambda: client.generate([1, 2], LONG), lambda: client.update_weights(trained)):
            with pytest.raises(EngineClosed):
                verb()
        assert served.process.wait(30) == 0


def test_a_member_that_is_let_go_has_its_notice_and_then_others_go_on(front, trained):
    fleet, client = front.fleet, front.rollout
    expected = tokens(client.generate(PROMPTS, LONG))

    def let_go(name, notice, paused):
        """While streams run on all members."""
        begun = threading.Barrier(len(PROMPTS) + 1)

        def one(prompt):
            with closing(client.stream(prompt, LONG)) as stream:
                last = next(stream)
                begun.wait(60)
                for last in stream:  # noqa: B007
                    pass
            return last.outputs[0].token_ids

        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            running = [pool.submit(one, prompt) for prompt in PROMPTS]
            begun.wait(60)
            if paused:
                client.pause_generation("keep")
            [link] = (link for link in fleet.links() if link.name == name)
            with ThreadPoolExecutor(2) as leaving:
                ends = [leaving.submit(fleet.leave, name, notice) for _ in range(2)]
                eventually(lambda: name not in (each.name for each in fleet.serving()))
                for end in ends:
                    end.result(60)
            calls = link.calls
            if paused:
                client.resume_generation()
            assert [each.result(60) for each in running] == expected
        assert not calls
        assert name not in (row["name"] for row in fleet.members())

    let_go(front.names[0], 60.0, paused=False)
    let_go(front.names[1], 0.3, paused=True)
    members = client.update_weights(trained).details["members"]
    assert members == {front.names[0]: "left", front.names[1]: "left", front.names[2]: "committed"}
    assert client.update_weights(trained).details["members"] == {front.names[2]: "committed"}
    with pytest.raises(ConfigError, match="no member"):
        fleet.leave(front.names[0], 1.0)
