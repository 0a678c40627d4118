"""Fronts that route only, beside the one that coordinates: one fleet for all their clients."""

import asyncio
import time
from contextlib import closing

import httpx
import pytest
from fleet_front import LEASE, Front, OneMore, break_off
from shared_engines import eventually

from rollout import AsyncRollout, Rollout, SamplingParams
from rollout.errors import ConfigError, EngineClosed, VersionConflict
from rollout.fleet.fronts.routed_fleet import RoutedFleet
from rollout.fleet.fronts.routing_front import RoutingFront
from rollout.fleet.link import Link
from rollout.rpc.client import RolloutClient
from rollout.server.http.app import build_app

GREEDY = {"max_tokens": 6, "temperature": 0.0}
LONG = {"max_tokens": 200, "temperature": 0.0, "ignore_eos": True}
PROMPTS = [[5, 6, 7, n] for n in range(12)]
WAIT = 30.0  # seconds: for hangs


@pytest.fixture
def front(engines, tmp_path):
    """With leases that a busy machine does not outlast."""
    front = Front(tmp_path / "record", engines, lease=10.0)
    yield front
    front.close()


@pytest.fixture
def other(front):
    """A front that routes only, beside ``front``."""
    front.fleet.wait_serving(3, WAIT)
    more = OneMore(front.rollout.address)
    yield more
    more.close()


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_updates_reads_and_control_through_any_front_are_the_fleets(
    front, other, engines, trained, oracle
):
    with (
        Rollout.connect(front.rollout.address) as first,
        Rollout.connect(other.rollout.address) as second,
    ):
        assert second.server_info().epoch == first.server_info().epoch == front.fleet.epoch
        before = tokens(second.generate(PROMPTS, GREEDY))
        receipt = second.update_weights(trained)
        assert receipt.details["members"] == dict.fromkeys(front.names, "committed")
        assert second.weight_version == first.weight_version == receipt.version == 1
        expected = tokens(oracle.generate(PROMPTS, GREEDY))
        for client in (first, second):
            outputs = client.generate(PROMPTS, GREEDY)
            assert tokens(outputs) == expected
            assert {s.version for o in outputs for s in o.outputs[0].weight_versions} == {1}
            assert {o.epoch for o in outputs} == {front.fleet.epoch}
            assert client.check_weights(trained).equal
            assert client.weight_info().last_update_id == receipt.update_id
            assert client.receipts()[-1].digest == receipt.digest
            assert client.metrics().weight_updates_total == 1
            assert client.generate([[1]], {**GREEDY, "min_version": 1})[0].finished
        told = [(r["name"], r["address"], r["http"], r["status"]) for r in other.fleet.members()]
        assert told == [(name, name, None, "serving") for name in front.names]

        first.update_weights(trained)
        assert [engine.weight_version for engine in engines] == [2, 2, 2]
        outputs = second.generate(PROMPTS, {**GREEDY, "min_version": 2})
        assert {s.version for o in outputs for s in o.outputs[0].weight_versions} == {2}
        assert second.rollback().version == 3
        with pytest.raises(VersionConflict):
            second.update_weights(trained, version=2)

        second.sleep(1, "wait")  # before any call has met the members through their front
        second.wake_up()
        second.pause_generation()
        second.reset_prefix_cache(reset_running_requests=True)
        assert first.metrics().paused
        assert second.metrics().paused
        assert first.metrics().state == second.metrics().state == "paused"
        # On a busy machine a lease may just have run out.
        eventually(lambda: {engine.metrics().state for engine in engines} == {"paused"}, WAIT)
        first.resume_generation()
        eventually(lambda: second.metrics().state == "running", WAIT)
        second.sleep(1)
        assert first.metrics().state == "asleep"
        with pytest.raises(EngineClosed, match="asleep"):
            second.generate([[1]], GREEDY)
        second.wake_up()
        assert tokens(second.generate(PROMPTS, GREEDY)) == expected != before
    assert not any(link.calls for link in other.fleet.links())
    for address, why in (
        (engines[0].address, "this is one engine"),
        (other.rollout.address, "routes only: name the one that coordinates"),
    ):
        fleet = RoutedFleet(RolloutClient(address))
        with closing(fleet), pytest.raises(ConfigError, match=why):
            fleet.wait_serving(WAIT)


def test_a_stream_through_any_front_goes_on_elsewhere_when_its_member_dies(front, other, engines):
    expected = tokens(other.rollout.generate(PROMPTS[:1], LONG))
    with closing(other.rollout.stream(PROMPTS[0], LONG)) as stream:
        last = next(stream)
        cut = len(last.outputs[0].token_ids)
        [link] = [link for link in other.fleet.links() if link.calls]
        break_off(next(engine for engine in engines if engine.address == link.name))
        for last in stream:
            found = last.outputs[0].token_ids
            assert len(found) >= cut
            cut = len(found)
    assert [last.outputs[0].token_ids] == expected
    assert other.rollout.generate(PROMPTS, GREEDY)[0].finished


@pytest.mark.more
def test_without_a_coordinating_front_others_serve_until_leases_end_and_go_on_when_it_is_back(
    engines, tmp_path, trained, caplog
):
    front = Front(tmp_path / "record", engines[:2])
    front.fleet.wait_serving(2, WAIT)
    address = front.rollout.address
    other = OneMore(address)
    try:
        with pytest.raises(EngineClosed, match="no member of the fleet that the front asks for"):
            asyncio.run(asked_as_a_member(engines[2], front.fleet.fleet_id))
        assert other.rollout.update_weights(trained).version == 1
        expected = tokens(other.rollout.generate(PROMPTS, GREEDY))
        ended = time.monotonic()
        front.close()
        if time.monotonic() - ended < LEASE / 2:  # else this machine was too busy to tell
            assert tokens(other.rollout.generate(PROMPTS, GREEDY)) == expected
        eventually(lambda: all(one.metrics().state == "fenced" for one in engines[:2]), WAIT)
        with pytest.raises(EngineClosed, match=r"(?s)coordinat"):
            other.rollout.generate(PROMPTS, GREEDY)
        with pytest.raises(EngineClosed, match="does not answer"):
            other.rollout.update_weights(trained)

        front = Front(tmp_path / "record", engines[:2], port=int(address.rpartition(":")[2]))
        front.fleet.wait_serving(2, WAIT)
        assert front.rollout.address == address
        assert tokens(other.rollout.generate(PROMPTS, GREEDY)) == expected
        eventually(lambda: other.fleet._problem is None, WAIT)  # it has found it again
        assert other.rollout.update_weights(trained).version == 2
        said = [r.getMessage() for r in caplog.records if r.name.endswith("routed_fleet")]
        assert said[0].startswith("the coordinating front does not answer")
        assert said[-1].startswith("the coordinating front answers, after")
    finally:
        other.close()
        front.close()


async def asked_as_a_member(engine, fleet):
    """By a front that holds it for one: as it may where one was started anew, to serve alone."""
    link = Link.to(engine.address, None, "m", LEASE, None)
    try:
        return [
            output
            async for _, output in link.client.generate(
                [[1]], [SamplingParams(max_tokens=1)], ["a"], stream=False, fleet=fleet
            )
        ]
    finally:
        await link.client.disconnect()
        link.close()


def test_of_trainers_that_broadcast_a_front_that_routes_only_names_the_other(front):
    """Their clients' pauses are the fleet's, as everywhere."""
    front.fleet.wait_serving(3, WAIT)
    group = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}

    async def course():
        client = RolloutClient(front.rollout.address, keeps_epoch=False)
        rollout = AsyncRollout.over(RoutingFront(RoutedFleet(client), start_timeout=60.0))
        transport = httpx.ASGITransport(build_app(rollout))
        async with rollout, httpx.AsyncClient(transport=transport, base_url="http://x") as http:
            for path in ("/pause_generation", "/continue_generation"):
                assert (await http.post(path, json={})).status_code == 200, path
            return await http.post("/init_weight_transfer_engine", json={"init_info": group})

    reply = asyncio.run(course())
    assert reply.status_code == 400
    assert "go to the front that coordinates" in reply.text
