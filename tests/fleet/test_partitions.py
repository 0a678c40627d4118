"""What a partition keeps from a member, or from its front, and what arrives late behind it."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress

import pytest
from fleet_front import Front, OneMore
from proxies import Proxy
from shared_engines import eventually
from tiny_models import randomize

from rollout.errors import EngineClosed, RolloutError

GREEDY = {"max_tokens": 3, "temperature": 0.0}
PROMPTS = [[5, 6, 7, n] for n in range(12)]
TIMEOUT = 8.0  # of an update's waits
BOTH, CALLS, ANSWERS = {}, {"down": False}, {"up": False}


class Behind:
    """A proxied engine, as a front has it."""

    def __init__(self, proxy):
        self.address = proxy.address


@pytest.fixture
def proxies(engines):
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy(engine.address)) for engine in engines]


@pytest.fixture
def parted(proxies, tmp_path):
    front = Front(tmp_path / "record", map(Behind, proxies))
    front.fleet.wait_serving(3, 60.0)
    yield front
    for proxy in proxies:
        proxy.go_on()
    front.close()


def held_in_the_midst(model, proxy, **directions):
    """Other weights, and a partition once some of them are under way."""
    randomize(model)
    for number, item in enumerate(model.state_dict().items()):
        if number == 3:
            proxy.hold(**directions)
        yield item


def course(parted, engines, proxies, model, **directions):
    """One update, which a partition cuts the last member off from: what it then is, and has."""
    cut_off, proxy = engines[2], proxies[2]
    before = parted.fleet.version
    receipt = parted.rollout.update_weights(
        held_in_the_midst(model, proxy, **directions), timeout=TIMEOUT
    )
    told = receipt.details["members"]
    assert receipt.version == before + 1
    assert [told[proxy.address] for proxy in proxies[:2]] == ["committed", "committed"]
    with pytest.raises(EngineClosed, match="lease has run out"):  # also who asks it directly
        cut_off.generate([[1, 2]], GREEDY)
    [output] = parted.rollout.generate([[1, 2, 3]], GREEDY)
    assert {span.version for span in output.outputs[0].weight_versions} == {before + 1}
    proxy.go_on()
    parted.fleet.wait_serving(3, 60.0)
    assert cut_off.weight_version == before + 1
    assert cut_off.check_weights(model).equal
    eventually(lambda: not cut_off.weight_info().prepared)


def test_a_member_behind_a_partition_serves_nobody_and_catches_up(
    parted, engines, proxies, trained
):
    course(parted, engines, proxies, trained, **BOTH)


def test_a_member_behind_a_partition_keeps_no_verb_from_the_others_and_is_brought_to_it(
    parted, engines, proxies
):
    lease, cached = parted.fleet.lease, [list(range(1, 65))]
    assert parted.rollout.generate(PROMPTS, GREEDY)
    engines[2].generate(cached, GREEDY)
    assert engines[2].generate(cached, GREEDY)[0].num_cached_tokens
    proxies[2].hold()
    begun = time.monotonic()
    parted.rollout.pause_generation("keep")
    parted.rollout.reset_prefix_cache()
    assert parted.rollout.metrics().paused
    assert time.monotonic() - begun < 4 * lease
    assert {engine.metrics().state for engine in engines[:2]} == {"paused"}
    before = [engine.metrics().generation_tokens_total for engine in engines]
    with ThreadPoolExecutor(1) as pool:
        proxies[2].go_on()
        parted.fleet.wait_serving(3, 60.0)
        asked = pool.submit(parted.rollout.generate, PROMPTS, GREEDY)
        try:
            with pytest.raises(TimeoutError):
                asked.result(1.0)
            assert before == [engine.metrics().generation_tokens_total for engine in engines]
            assert engines[2].metrics().paused
        finally:
            parted.rollout.resume_generation()
        assert all(output.finished for output in asked.result(60.0))
    assert not engines[2].generate(cached, GREEDY)[0].num_cached_tokens


def test_a_member_that_gets_short_packets_alone_is_given_no_calls(parted, proxies):
    """Leases went through, and each call that was sent there waited for the keepalive."""
    long = [[5, 6, 7, n] * 50 for n in range(12)]
    assert parted.rollout.generate(long, GREEDY)
    proxies[2].longest = 1400
    eventually(lambda: len(parted.fleet.serving()) == 2)
    begun = time.monotonic()
    assert all(output.finished for output in parted.rollout.generate(long, GREEDY))
    assert time.monotonic() - begun < 4 * parted.fleet.lease
    proxies[2].longest = 1 << 16
    proxies[2].cut()
    parted.fleet.wait_serving(3, 60.0)


def test_a_front_that_routes_only_waits_for_nobody_behind_a_partition(parted, proxies):
    with Proxy(parted.rollout.address) as way:
        other = OneMore(way.address)
        try:
            assert all(output.finished for output in other.rollout.generate(PROMPTS, GREEDY))
            proxies[2].hold()
            # Nothing of the third is asked once that is told.
            eventually(lambda: len(other.fleet.serving()) == len(other.fleet.with_calls()) == 2)
            begun = time.monotonic()
            assert other.rollout.abort() == 0
            assert time.monotonic() - begun < 4 * parted.fleet.lease
            way.hold()
            begun = time.monotonic()
            with suppress(EngineClosed):  # of members, which serve until their leases end
                other.rollout.metrics()
            assert time.monotonic() - begun < 4 * parted.fleet.lease
        finally:
            way.go_on()
            other.close()


@pytest.mark.more
def test_what_one_side_alone_does_not_hear_arrives_late_and_changes_nothing(
    parted, engines, proxies, trained
):
    for directions in (CALLS, ANSWERS, CALLS, ANSWERS):
        course(parted, engines, proxies, trained, **directions)


@pytest.mark.more
def test_an_update_ends_where_a_partition_leaves_too_few(parted, engines, proxies, trained):
    proxies[1].hold()
    with pytest.raises(RolloutError):
        parted.rollout.update_weights(held_in_the_midst(trained, proxies[2]), timeout=TIMEOUT)
    assert {engine.weight_version for engine in engines} == {0}
    for proxy in proxies:
        proxy.go_on()
    parted.fleet.wait_serving(3, 60.0)
    assert parted.rollout.update_weights(trained, timeout=TIMEOUT).version == 1
    assert {engine.weight_version for engine in engines} == {1}
