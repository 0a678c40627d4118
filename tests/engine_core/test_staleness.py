"""Samples that fall behind the live weights: what their bound makes of them, and what is told."""

from __future__ import annotations

from dataclasses import replace

import pytest
from engine_core.harness import PROMPT, Sink, Start, commit, held, request, run
from engine_core.toy_model import continuation

from rollout.engine.core import EngineCore
from rollout.errors import ConfigError, InvalidRequest
from rollout.generation import SamplingParams
from rollout.weights.adapters import AdapterVersion


@pytest.mark.parametrize("on_stale", ["recompute", "finish", "abort"])
def test_a_sample_that_is_too_old_is_recomputed_finished_or_aborted(
    start: Start, on_stale: str
) -> None:
    core = start()
    sink = held(core, 5, max_tokens=220, max_staleness=1, on_stale=on_stale)
    commit(core, 1)  # one version behind: within its bound
    assert sum(core.counters.stale.values()) == 0
    commit(core, 2)
    core.control.resume().result()
    sample = sink.results()["a"].outputs[0]
    done = sample.weight_versions[0].stop
    assert sample.token_ids[:done] == continuation(PROMPT, done)
    assert core.counters.stale == {"recompute": 0, "finish": 0, "abort": 0} | {on_stale: 1}
    assert sample.staleness == 2
    if on_stale == "recompute":
        known = PROMPT + sample.token_ids[:done]
        assert sample.token_ids[done:] == continuation(known, 220 - done, weights=2)
        assert [span.version for span in sample.kv_spans] == [2]
        assert (sample.finish_reason, sample.stop_reason) == ("length", None)
    else:
        assert [span.version for span in sample.weight_versions] == [0]
        reason = {"finish": "length", "abort": "abort"}[on_stale]
        assert (sample.finish_reason, sample.stop_reason) == (reason, "max_staleness")
        assert sample.is_cut_short == (on_stale == "abort")
    assert core.blocks.num_free == core.num_kv_blocks


def test_the_engines_bound_holds_for_requests_that_bring_none(start: Start) -> None:
    core = start(max_staleness=0, on_stale="finish")
    mine, own = Sink(), request("mine", max_tokens=220, max_staleness=9, on_stale="abort")
    core.submit([own], mine, stream=True)
    mine.wait_for(2)
    sink = held(core, 3, max_tokens=220)
    commit(core, 3)
    core.control.resume().result()
    assert sink.results()["a"].outputs[0].stop_reason == "max_staleness"
    sample = mine.results()["mine"].outputs[0]
    assert (len(sample.token_ids), sample.staleness) == (220, 3)
    assert run(core, request("new", max_tokens=4))["new"].outputs[0].staleness == 0
    staleness = core.stats().staleness
    assert (staleness.count, staleness.total) == (3, 6.0)


def test_what_another_engine_has_begun_is_judged_when_it_comes(start: Start) -> None:
    """As the commits that it was elsewhere for would have judged it here."""
    core = start(max_staleness=1, on_stale="abort")
    begun = run(core, request("begun", max_tokens=5))["begun"].outputs[0]
    begun = replace(begun, finish_reason=None)
    for version, staleness in ((1, 1), (3, 3)):
        commit(core, version)
        for on_stale, reason in ((None, "abort"), ("finish", "length"), ("recompute", "length")):
            asked = request(max_tokens=9, on_stale=on_stale)
            sample = run(core, replace(asked, delivered=(begun,)))["a"].outputs[0]
            ended = staleness > 1 and on_stale != "recompute"
            assert sample.stop_reason == ("max_staleness" if ended else None)
            assert sample.finish_reason == (reason if ended else "length")
            assert len(sample.token_ids) == (5 if ended else 9)
            assert sample.staleness == staleness
    assert core.counters.stale == {"recompute": 1, "finish": 1, "abort": 1}
    assert core.blocks.num_free == core.num_kv_blocks


def test_samples_of_one_request_are_judged_each_by_its_own_tokens(start: Start) -> None:
    core = start(max_num_seqs=1)  # the second sample begins when the first has ended
    sink = held(core, 3, n=2, max_tokens=220, seed=1, max_staleness=0, on_stale="finish")
    commit(core, 1)
    core.control.resume().result()
    first, second = sink.results()["a"].outputs
    assert first.stop_reason == "max_staleness"
    assert len(first.token_ids) < 220
    assert [span.version for span in second.weight_versions] == [1]
    assert (len(second.token_ids), second.staleness) == (220, 0)


def test_commits_of_other_adapters_alone_do_not_count(start: Start) -> None:
    core = start()
    sink = held(core, 5, max_tokens=220, max_staleness=1, on_stale="abort")
    [seq] = core.scheduler.begun()
    seq.adapter = AdapterVersion(name="math", version=0, slot=0)  # this model has no slots
    for version in (1, 4):
        commit_adapters(core, version, "code")
    commit(core, 5)
    commit_adapters(core, 7, "code")
    assert sum(core.counters.stale.values()) == 0
    commit_adapters(core, 8, "code", "math")
    assert core.counters.stale == {"recompute": 0, "finish": 0, "abort": 1}
    core.control.resume().result()
    sample = sink.results()["a"].outputs[0]
    assert (sample.finish_reason, sample.stop_reason) == ("abort", "max_staleness")
    assert core.stats().staleness.total == 2


def test_a_sample_of_the_base_is_behind_by_the_bases_commits(start: Start) -> None:
    core = start()
    sink = held(core, 5, max_tokens=220, max_staleness=0, on_stale="abort")
    for version in (1, 2):
        commit_adapters(core, version, "math")
    commit(core, 5)  # three numbers on: as far as without adapters
    core.control.resume().result()
    assert sink.results()["a"].outputs[0].stop_reason == "max_staleness"
    assert core.stats().staleness.total == 3


def commit_adapters(core: EngineCore, version: int, *names: str) -> None:
    def boundary() -> None:
        core.on_commit(version, "keep", models=False, adapters=names)

    core.at_step_boundary(boundary).result(5)


def test_bounds_that_are_none_are_refused() -> None:
    for bad in ({"max_staleness": -1}, {"max_staleness": 1.5}, {"on_stale": "keep"}):
        with pytest.raises(InvalidRequest, match=next(iter(bad))):
            SamplingParams(**bad)


def test_settings_that_are_none_are_refused(start: Start) -> None:
    for bad in ({"max_staleness": -1}, {"on_stale": "keep"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            start(**bad)
