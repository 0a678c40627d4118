"""A client's requests are not older than what it has committed, or than it says."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from shared_engines import eventually

from rollout import (
    AsyncRollout,
    EngineRestarted,
    InvalidRequest,
    Rollout,
    SamplingParams,
    VersionConflict,
)
from rollout.api.read_floor import ReadFloor

GREEDY = {"max_tokens": 4, "temperature": 0.0}
IDS = [5, 6, 7]


def versions(output):
    return {span.version for span in output.outputs[0].weight_versions}


@pytest.mark.parametrize("connected", [True, False], ids=["grpc", "embedded"])
def test_requests_of_a_client_wait_for_its_min_version_unless_they_ask(
    engine, other_weights, changed, connected
):
    live = engine.weight_version
    with ThreadPoolExecutor(1) as pool, Rollout.connect(engine.address, timeout=10) as client:
        asks = client if connected else engine
        asks.min_version = live + 1
        try:
            waits = pool.submit(asks.generate, IDS, GREEDY)
            [any_version] = asks.generate(IDS, {**GREEDY, "min_version": 0})
            [of_a_group] = asks.generate(IDS, {**GREEDY, "group_id": "a group's own version"})
            assert not waits.done()
            assert versions(any_version) == versions(of_a_group) == {live}
            receipt = client.update_weights(changed(other_weights, 0.25), timeout=10)
            [newer] = waits.result(30)
        finally:
            engine.min_version = 0
        assert versions(newer) == {receipt.version} == {live + 1}


def test_a_min_version_that_does_not_come_is_refused_with_what_is_live(checkpoint):
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32, "timeout": 1}
    with Rollout(checkpoint, **settings) as one:
        asked = pytest.raises(VersionConflict, match=r"version 7 was .* within 1 s: version 0 is")
        with Rollout.connect(one.address, timeout=10, min_version=7) as client, asked:
            client.generate(IDS, GREEDY)


async def test_a_client_waits_for_a_version_within_its_own_timeout(engine, other_weights):
    receipt = engine.update_weights(other_weights, timeout=10)
    never = {**GREEDY, "min_version": 1 << 40}
    chat = [{"role": "user", "content": "Hi"}]
    async with AsyncRollout.connect(engine.address, timeout=0.3) as client:
        for waits in (
            client.generate([IDS, IDS], never),
            anext(client.stream(IDS, never)),
            client.chat(chat, never),
        ):
            with pytest.raises(VersionConflict, match=r"client's timeout of 0.3 s: version \d+ is"):
                await asyncio.wait_for(waits, 10)  # the engine waits for 30 s
        eventually(lambda: engine.metrics().waiting == 0)  # it hears of those that have left
        engine.pause_generation()
        late = {**GREEDY, "min_version": receipt.version}
        calls = [client.generate(IDS, late), client.generate([IDS, IDS], late)]
        running = asyncio.gather(*calls)
        await asyncio.sleep(1)
        assert not running.done()  # what is slow is not the version
        engine.resume_generation()
        one, two = await asyncio.wait_for(running, 30)
        assert [output.finished for output in (*one, *two)] == [True] * 3


def test_another_epoch_is_told_at_once_and_nothing_is_generated(checkpoint, other_weights):
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 32}
    # The second is there before the first goes: nobody else takes the port meanwhile.
    with Rollout(checkpoint, **settings) as second:
        with Rollout(checkpoint, **settings) as first:
            address = first.address
            trainer = Rollout.connect(address, timeout=10)
            reader = Rollout.connect(address, timeout=10, min_version=1)
            talks = Rollout.connect(address, timeout=10)
            session = talks.session()
            trainer.update_weights(other_weights, timeout=10)
            reader.generate(IDS, GREEDY)
            session.generate(IDS, GREEDY)
        assert second.serve(port=int(address.rsplit(":")[-1])) == address
        for asks in (trainer, reader, session, session.fork()):  # which have seen version 1
            with pytest.raises(EngineRestarted, match="full update"):
                asks.generate(IDS, GREEDY)
        with pytest.raises(EngineRestarted, match="full update"):
            trainer.generate(IDS, {**GREEDY, "min_version": 1})
        assert second.metrics().prompt_tokens_total == 0
        receipt = trainer.update_weights(other_weights, timeout=10)
        assert versions(trainer.generate(IDS, GREEDY)[0]) == {receipt.version}
        reader.min_version = receipt.version
        assert reader.generate(IDS, GREEDY)[0].epoch == receipt.epoch
        wrong = {**GREEDY, "min_version": 1, "min_version_epoch": receipt.epoch + 1}
        with pytest.raises(EngineRestarted, match=f"and this is epoch {receipt.epoch}"):
            second.generate(IDS, wrong)
        for one in (trainer, reader, talks):
            one.shutdown()


def test_a_floor_of_another_epoch_does_not_count_beside_ones_own():
    own, theirs = ReadFloor(3, 1), ReadFloor(5, 1)
    assert own.joined(theirs) == theirs.joined(own) == theirs
    assert own.joined(ReadFloor(9, 2)) == own
    assert ReadFloor().joined(own) == own
    one, free = SamplingParams(min_version=2), SamplingParams(min_version=0)
    assert own.under([one, free])[0].min_version_epoch == 1
    assert own.under([free]) == [free]
    for bad in (-1, "3", True, 1.0):
        with pytest.raises(InvalidRequest, match="min_version must be"):
            ReadFloor.of(bad)
