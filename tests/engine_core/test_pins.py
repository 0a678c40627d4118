"""Requests that finish on the version they began with, over the toy model."""

from __future__ import annotations

import pytest
from engine_core.harness import PROMPT, Sink, Start, commit, held, request, run
from engine_core.toy_model import continuation

from rollout.engine.core import EngineCore
from rollout.engine.pins import PinTerms

LONG = 220


def pin(core: EngineCore, version: int, fallback: str = "keep", timeout: float = 30.0) -> None:
    commit(core, version, "pin", PinTerms(timeout=timeout, fallback=fallback))


def test_a_group_finishes_on_its_version_and_new_requests_run_on_the_new_one(start: Start) -> None:
    core = start(max_num_seqs=2)  # so that of the group, too, some have not begun
    sink = held(core, 3, n=3, seed=1, max_tokens=LONG)
    pin(core, 1)
    stats = core.stats()
    assert (stats.pinned_requests, stats.pinned_version, stats.weight_version) == (1, 0, 1)
    assert not core.pins.wait(0)
    other = Sink()
    core.submit([request("new", max_tokens=8)], other, stream=False)
    core.control.resume().result()
    samples = sink.results()["a"].outputs
    new = other.results()["new"].outputs[0]
    for sample in samples:
        assert sample.token_ids == continuation(PROMPT, LONG)
        assert {span.version for span in (*sample.weight_versions, *sample.kv_spans)} == {0}
        assert sample.staleness == 1
    assert new.token_ids == continuation(PROMPT, 8, weights=1)
    assert [span.version for span in new.kv_spans] == [1]
    assert core.pins.wait(10)
    assert core.pins.told.startswith("pinned to version 0 for ")
    assert core.pins.told.endswith("all ended")
    stats = core.stats()
    assert (stats.pinned_requests, stats.pinned_version) == (0, -1)
    assert 0 < stats.pinned_steps_total < stats.steps_total
    assert core.blocks.num_free == core.num_kv_blocks
    again = run(core, request("again", max_tokens=8))["again"]
    assert again.outputs[0].token_ids == new.token_ids
    assert again.num_cached_tokens == 16  # of the new one, and of nobody that was pinned


def test_samples_that_wait_are_pinned_also_when_those_that_began_have_ended(start: Start) -> None:
    core = start(max_num_seqs=1)
    sink = held(core, 3, n=3, seed=1, max_tokens=3)  # the first has ended, at this very boundary
    assert [sample.finish_reason for sample in sink.items[-1].outputs] == ["length", None, None]
    pin(core, 1)
    core.control.resume().result()
    for sample in sink.results()["a"].outputs:
        assert sample.token_ids == continuation(PROMPT, 3)
        assert {span.version for span in (*sample.weight_versions, *sample.kv_spans)} == {0}


def test_both_versions_step_in_turns_while_a_pin_lasts(start: Start) -> None:
    core = start(num_kv_blocks=160)  # room for both
    sink = held(core, 3, max_tokens=200)
    left = 200 - len(sink.items)  # one token each
    pin(core, 1)
    other = Sink()
    core.submit([request("new", [7, 8, 9], max_tokens=200)], other, stream=True)
    ahead = core.loop.steps_ahead
    before = core.stats()
    core.control.resume().result()
    old = sink.results()["a"].outputs[0]
    other.results()
    done = core.stats()
    assert done.pinned_steps_total == left
    assert old.token_ids == continuation(PROMPT, 200)
    assert done.steps_total - before.steps_total == left + 200
    if core.config.async_scheduling:  # of the newer one alone, once the older one has ended
        assert 0 < core.loop.steps_ahead - ahead <= 200 - left + 2


@pytest.mark.parametrize("fallback", ["keep", "recompute", "abort"])
def test_at_its_deadline_what_is_pinned_takes_its_fallback(start: Start, fallback: str) -> None:
    core = start()
    sink = held(core, 5, max_tokens=LONG)  # paused, so that it cannot end in time
    pin(core, 1, fallback, timeout=0.05)
    assert core.pins.wait(10)
    assert f"1 requests took the fallback {fallback!r} at pin_timeout" in core.pins.told
    assert core.stats().pin_fallbacks_total == 1
    core.control.resume().result()
    sample = sink.results()["a"].outputs[0]
    versions = [span.version for span in sample.weight_versions]
    if fallback == "abort":
        assert (sample.finish_reason, versions) == ("abort", [0])
    else:
        assert versions == [0, 1]
        kv = [span.version for span in sample.kv_spans]
        assert kv == ([0, 1] if fallback == "keep" else [1])
    assert core.blocks.num_free == core.num_kv_blocks


def test_aborted_pins_and_a_sleep_end_at_once(start: Start) -> None:
    core = start()
    held(core, 3, max_tokens=LONG)
    pin(core, 1)
    assert core.control.abort(["a"]).result() == 1
    assert core.pins.wait(10)
    assert core.pins.told.endswith("all ended")
    core.control.resume().result()
    sink = held(core, 3, max_tokens=LONG)
    pin(core, 2, "recompute")
    core.control.sleep(1).result()
    assert core.pins.wait(0)
    assert core.pins.told.endswith("'recompute' before a sleep")
    core.control.wake_up().result()
    core.control.resume().result()
    assert [s.version for s in sink.results()["a"].outputs[0].weight_versions] == [1, 2]


def test_an_age_of_none_goes_before_a_pin(start: Start) -> None:
    core = start()
    sink = held(core, 3, max_tokens=LONG, max_staleness=0)
    pin(core, 1)
    assert core.pins.wait(0)
    core.control.resume().result()
    sample = sink.results()["a"].outputs[0]
    assert [span.version for span in sample.kv_spans] == [1]


def test_closing_ends_pins(start: Start) -> None:
    core = start()
    held(core, 3, max_tokens=LONG)
    pin(core, 1)
    core.close()
    assert core.pins.wait(10)


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
def test_a_request_that_asks_is_pinned_while_others_follow_the_update(
    start: Start, in_flight: str
) -> None:
    core = start(num_kv_blocks=160)
    asks, follows = Sink(), Sink()
    core.submit([request("asks", n=2, seed=1, max_tokens=60, pin=True)], asks, stream=True)
    core.submit([request("follows", max_tokens=60)], follows, stream=True)
    asks.wait_for(3)
    follows.wait_for(3)
    core.control.pause("keep").result()
    commit(core, 1, in_flight, PinTerms(timeout=30.0, fallback="abort"))
    assert core.pins.told == "1 requests finish on version 0, for at most 30 s, then abort"
    core.control.resume().result()
    for sample in asks.results()["asks"].outputs:
        assert sample.token_ids == continuation(PROMPT, 60)
        assert {span.version for span in (*sample.weight_versions, *sample.kv_spans)} == {0}
    other = follows.results()["follows"].outputs[0]
    kv = [span.version for span in other.kv_spans]
    assert kv == {"keep": [0, 1], "recompute": [1], "abort": [0]}[in_flight]
    assert (other.finish_reason == "abort") == (in_flight == "abort")
    assert core.stats().pinned_steps_total > 0
    assert core.pins.wait(10)


def test_a_group_has_one_version_whenever_its_requests_begin(start: Start) -> None:
    core = start(max_num_seqs=1)  # so that the second waits when the commit comes
    group = {"max_tokens": 60, "group_id": "g"}
    sinks = [Sink() for _ in range(5)]
    core.submit([request("a", **group, pin=True)], sinks[0], stream=True)
    core.submit([request("b", [9, 8, 7], **group)], sinks[1], stream=False)
    sinks[0].wait_for(3)
    core.control.pause("keep").result()
    commit(core, 1, "abort", PinTerms(timeout=30.0, fallback="keep"))
    core.submit([request("c", [3, 4, 5], **group)], sinks[2], stream=False)
    core.submit([request("d", [3, 4, 5], **group, min_version=1)], sinks[3], stream=False)
    core.submit([request("g", [3, 4, 5], max_tokens=8)], sinks[4], stream=False)
    core.control.resume().result()
    found = [sink.results()[name].outputs[0] for sink, name in zip(sinks, "abcdg", strict=True)]
    versions = [{span.version for span in one.weight_versions} for one in found]
    assert versions == [{0}, {0}, {0}, {1}, {1}]
    assert found[2].token_ids == continuation([3, 4, 5], 60)
    assert core.pins.wait(10)
    core.scheduler.check_integrity()
    late = run(core, request("late", **group))["late"].outputs[0]  # none of its group is pinned
    assert [span.version for span in late.weight_versions] == [1]


def test_a_pin_that_cannot_be_had_is_told_and_goes_by_the_update(start: Start) -> None:
    core = start()
    sink = held(core, 3, max_tokens=LONG, pin=True)
    commit(core, 1)  # without terms: two versions cannot run
    assert core.pins.told.startswith("none: 1 requests asked for it, and went by in_flight='keep'")
    assert core.stats().pin_fallbacks_total == 1
    core.control.resume().result()
    sample = sink.results()["a"].outputs[0]
    assert [span.version for span in sample.weight_versions] == [0, 1]
