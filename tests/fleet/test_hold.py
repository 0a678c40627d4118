"""Paused or asleep is a fleet's state: members that miss the word for it are brought to it."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fleet_front import ENGINE, Front, break_off

from rollout import Rollout
from rollout.errors import ConfigError, DeadlineExceeded, EngineClosed
from rollout.weight_sync.protocol.membership import Grant

GREEDY = {"max_tokens": 6, "temperature": 0.0}
PROMPTS = [[5, 6, 7, n] for n in range(12)]
WAIT = 20.0  # seconds: for hangs


def back_again(front, engine, meanwhile):
    """``engine`` leaves the fleet, and comes back once ``meanwhile`` is done."""
    name = next(n for n in front.names if n == engine.address)
    front.fleet.remove(name)
    meanwhile()
    front.fleet.add(engine.address)
    front.fleet.wait_serving(3, WAIT)
    until = time.monotonic() + WAIT
    while engine.metrics().state == "fenced":  # its first grant is on its way
        assert time.monotonic() < until
        time.sleep(0.02)


def served(front, engine):
    """Whether all prompts end, some of them at ``engine``."""
    before = engine.metrics().prompt_tokens_total
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            front.rollout.generate, [[n, *p] for n in (1, 2) for p in PROMPTS], GREEDY
        )
        try:
            finished = all(output.finished for output in asked.result(WAIT))
        finally:
            engine.resume_generation()  # or the pool waits for ever
    return finished and engine.metrics().prompt_tokens_total > before


def test_members_that_miss_the_word_are_brought_to_it_before_they_are_called(front, engines):
    late = engines[2]
    front.rollout.pause_generation()
    assert front.rollout.metrics().state == "paused"
    back_again(front, late, front.rollout.resume_generation)
    assert served(front, late)

    back_again(front, late, front.rollout.pause_generation)
    before = [engine.metrics().generation_tokens_total for engine in engines]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(front.rollout.generate, PROMPTS, GREEDY)
        with pytest.raises(TimeoutError):
            asked.result(0.5)
        now = [engine.metrics().generation_tokens_total for engine in engines]
        front.rollout.resume_generation()
        assert all(output.finished for output in asked.result(WAIT))
    assert now == before, "who came back during the pause has generated"

    front.rollout.sleep(1)
    back_again(front, late, front.rollout.wake_up)
    assert late.metrics().state == "asleep"
    assert served(front, late)


VERBS = {
    "pause": lambda rollout: rollout.pause_generation("keep"),
    "sleep": lambda rollout: rollout.sleep(1),
    "resume": lambda rollout: rollout.resume_generation(),
    "wake_up": lambda rollout: rollout.wake_up(),
    "reset_prefix_cache": lambda rollout: rollout.reset_prefix_cache(),
}


@pytest.mark.parametrize("verb", VERBS)
def test_a_member_that_has_died_a_moment_ago_keeps_no_verb_from_the_others(front, engines, verb):
    front.fleet.wait_serving(3, WAIT)
    assert front.rollout.generate(PROMPTS, GREEDY)
    before = {"resume": VERBS["pause"], "wake_up": VERBS["sleep"]}.get(verb)
    if before is not None:
        before(front.rollout)
    break_off(engines[2])
    VERBS[verb](front.rollout)
    state = {"pause": "paused", "sleep": "asleep"}.get(verb, "running")
    front.fleet.wait_serving(2, WAIT)  # where the machine stood still, its grants are late
    assert front.rollout.metrics().state == state
    assert {engine.metrics().state for engine in engines[:2]} == {state}
    front.rollout.wake_up()
    front.rollout.resume_generation()
    assert all(output.finished for output in front.rollout.generate(PROMPTS, GREEDY))


@pytest.mark.more
def test_a_pause_that_one_member_does_not_take_holds_none(front, engines):
    first = threading.Event()

    def long():
        params = {**GREEDY, "max_tokens": 200, "ignore_eos": True}
        seen = []
        for output in front.rollout.stream(PROMPTS[0], params):
            seen.append(output)
            first.set()
        return seen[-1]

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(long)
        assert first.wait(WAIT)
        busy = next(engine for engine in engines if engine.metrics().running)
        busy.pause_generation("keep")  # so that it never drains
        with pytest.raises(DeadlineExceeded):
            front.rollout.pause_generation("wait", timeout=0.3)
        assert asked.result(WAIT).finished
    assert all(output.finished for output in front.rollout.generate(PROMPTS, GREEDY))


@pytest.mark.parametrize("paused", [True, False])
def test_the_next_front_finds_a_fleet_as_it_was_left(tmp_path, engines, paused):
    first = Front(tmp_path / "record", engines)
    if paused:
        first.rollout.pause_generation()
    first.rollout.sleep(1)
    first.close()
    second = Front(tmp_path / "record", engines)
    try:
        with pytest.raises(EngineClosed, match="asleep"):
            second.rollout.generate(PROMPTS, GREEDY)
        second.rollout.wake_up()
        assert second.rollout.metrics().state == ("paused" if paused else "running")
        second.rollout.resume_generation()
        assert all(output.finished for output in second.rollout.generate(PROMPTS, GREEDY))
    finally:
        second.close()


def test_the_next_front_holds_the_fleet_whatever_a_member_has_missed(tmp_path, engines):
    first = Front(tmp_path / "record", engines)
    first.rollout.generate(PROMPTS, GREEDY)
    back_again(first, engines[2], first.rollout.pause_generation)
    assert engines[2].metrics().state == "running"
    first.close()
    second = Front(tmp_path / "record", engines)
    try:
        assert second.rollout.metrics().state == "paused"
        assert second.rollout.metrics().paused
        second.fleet.wait_serving(3, WAIT)
        before = [engine.metrics().generation_tokens_total for engine in engines]
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(second.rollout.generate, PROMPTS, GREEDY)
            try:
                with pytest.raises(TimeoutError):
                    asked.result(1.0)
                assert before == [engine.metrics().generation_tokens_total for engine in engines]
            finally:
                second.rollout.resume_generation()
            assert all(output.finished for output in asked.result(WAIT))
    finally:
        second.close()


def test_the_next_front_knows_which_tags_a_fleet_has_yet_to_wake(tmp_path, engines):
    first = Front(tmp_path / "record", engines)
    first.rollout.sleep(1)
    first.rollout.wake_up(["weights"])
    first.close()
    second = Front(tmp_path / "record", engines)
    try:
        assert second.rollout.metrics().state == "asleep"
        second.rollout.wake_up(["kv_cache"])
        assert all(output.finished for output in second.rollout.generate(PROMPTS, GREEDY))
    finally:
        second.close()


@pytest.mark.parametrize("row", [True, False])
def test_a_pause_that_cannot_be_written_holds_none(front, engines, monkeypatch, row):
    if row:
        front.rollout.resume_generation()

    def full(put, is_there):
        raise ConfigError("the fleet's record could not be written: disk full")

    with monkeypatch.context() as disk:
        disk.setattr(front.fleet.record, "_write", full)
        with pytest.raises(ConfigError, match="could not be written"):
            front.rollout.pause_generation()
        assert all(output.finished for output in front.rollout.generate(PROMPTS, GREEDY))
    front.rollout.pause_generation()
    assert front.rollout.metrics().state == "paused"
    front.rollout.resume_generation()


def test_what_is_frozen_ends_with_the_lease(checkpoint):
    with (
        Rollout(checkpoint, **ENGINE) as engine,
        Rollout.connect(engine.address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        member = client._async.backend
        engine.pause_generation()
        asked = pool.submit(client.generate, [[1, 2]], GREEDY)
        stood = member.serve(Grant(fence=3, epoch=None))
        member.serve(Grant(fence=3, serial=1, epoch=stood.epoch, until=stood.clock + 0.5))
        try:
            with pytest.raises(EngineClosed, match="lease has run out"):
                asked.result(WAIT)
        finally:
            engine.resume_generation()
