"""``in_flight="pin"``: what has begun is what an engine without updates says, what is new what a
restarted one says, bit for bit; and how pins end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
from shared_engines import standing_still
from start_engines import PROMPTS, outcome, start

from rollout import ConfigError, Rollout, SamplingParams
from rollout.models.causal_lm import CausalLM

pytestmark = pytest.mark.usefixtures("forked_ranks")

TP2 = pytest.param((2, 1), marks=pytest.mark.more)
LONG = SamplingParams(n=3, temperature=0.9, seed=11, max_tokens=300, ignore_eos=True)


class Begun(threading.Thread):
    """A call whose answer is streamed; ``first`` is set when it has begun to come."""

    def __init__(self, rollout: Rollout, params: SamplingParams = LONG) -> None:
        super().__init__()
        self.rollout, self.params, self.first = rollout, params, threading.Event()
        self.last: Any = None
        self.start()
        assert self.first.wait(30)

    def run(self) -> None:
        for output in self.rollout.stream(PROMPTS[0], self.params):
            self.last = output
            if all(sample.token_ids for sample in output.outputs):
                self.first.set()

    def samples(self) -> list[Any]:
        self.join(60)
        assert not self.is_alive()
        return list(self.last.outputs)


def bits(samples: list[Any]) -> list[Any]:
    return [(s.token_ids, s.logprobs.raw, s.logprobs.processed) for s in samples]


def go_back(rollout: Rollout, path: Any) -> None:
    rollout.update_weights(path, timeout=20)


def in_background(fn: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    return thread, found


@pytest.mark.parametrize("engine", [(1, 1), TP2], ids=["tp1", "tp2"], indirect=True)
def test_pinned_and_new_requests_have_the_bits_of_their_own_weights(
    engine, fresh, checkpoints
) -> None:
    def begin() -> Begun:
        engine.reset_prefix_cache()
        return Begun(client)

    engine.reset_prefix_cache()
    alone = engine.generate(PROMPTS[0], LONG)[0].outputs  # and no update
    with Rollout.connect(engine.address, timeout=20) as client:
        begun = standing_still(begin, engine, running=3)
        live = engine.weight_version
        receipt = client.update_weights(checkpoints["b"], in_flight="pin", timeout=20)
        assert receipt.details["pinned"] == (
            f"1 requests finish on version {live}, for at most 20 s, then keep"
        )
        engine.resume_generation()
        assert outcome(client) == fresh["b"]
        samples = begun.samples()
    assert bits(samples) == bits(alone)
    spans = {span for s in samples for span in (*s.weight_versions, *s.kv_spans)}
    assert {span.version for span in spans} == {live}
    assert outcome(engine) == fresh["b"]
    stats = engine.metrics()
    assert stats.pinned_steps_total > 0
    assert (stats.pinned_version, stats.kv_usage) == (-1, 0.0)
    go_back(engine, checkpoints["a"])
    assert outcome(engine) == fresh["a"]


@pytest.mark.parametrize("engine", [(1, 1), TP2], ids=["tp1", "tp2"], indirect=True)
def test_the_next_update_waits_for_the_pins_or_their_fallback(engine, fresh, checkpoints) -> None:
    begun = standing_still(lambda: Begun(engine), engine, running=3)
    engine.update_weights(checkpoints["b"], in_flight="pin", timeout=20)
    thread, found = in_background(lambda: engine.update_weights(checkpoints["a"], timeout=20))
    thread.join(0.3)
    assert thread.is_alive()
    engine.resume_generation()
    assert {len(s.weight_versions) for s in begun.samples()} == {1}
    thread.join(60)
    assert found[0].details["pins"].endswith("s: all ended")
    begun = standing_still(lambda: Begun(engine), engine, running=3)
    receipt = engine.update_weights(
        checkpoints["b"], in_flight="pin", pin_timeout=0.2, pin_fallback="recompute", timeout=20
    )
    last = engine.update_weights(checkpoints["a"], timeout=20)  # that waits for the deadline
    assert "1 requests took the fallback 'recompute' at pin_timeout" in last.details["pins"]
    engine.resume_generation()
    for sample in begun.samples():
        assert receipt.version not in {span.version for span in sample.weight_versions}
        assert sample.weight_versions[-1].version == last.version
    assert outcome(engine) == fresh["a"]


@pytest.mark.parametrize("engine", [(1, 1), TP2], ids=["tp1", "tp2"], indirect=True)
def test_a_rollback_takes_pins_along_at_its_deadline(engine, fresh, checkpoints) -> None:
    begun = standing_still(lambda: Begun(engine), engine, running=3)
    engine.update_weights(checkpoints["b"], in_flight="pin", pin_fallback="abort", timeout=20)
    receipt = engine.rollback(timeout=2)  # for the pins, and then for the rest
    assert "took the fallback 'abort' before the next update" in receipt.details["pins"]
    engine.resume_generation()
    assert {s.finish_reason for s in begun.samples()} == {"abort"}
    assert outcome(engine) == fresh["a"]


@pytest.mark.more
def test_killed_pins_free_their_instance_and_updates_leave_nothing_behind(checkpoints) -> None:
    def models() -> int:
        gc.collect()
        return sum(issubclass(type(one), CausalLM) for one in gc.get_objects())

    with start(checkpoints["a"], 1, async_scheduling=True) as rollout:
        before = models()
        for number in range(4):
            begun = standing_still(lambda: Begun(rollout), rollout, running=3)
            path = checkpoints["ba"[number % 2]]
            receipt = rollout.update_weights(path, in_flight="pin", timeout=20)
            assert "pinned" in receipt.details
            assert models() - before <= 1  # the shadow
            assert rollout.abort([begun.last.request_id]) == 1
            rollout.resume_generation()
            assert {s.finish_reason for s in begun.samples()} == {"abort"}
        assert rollout.generate(PROMPTS[1], LONG)[0].finished
        stats = rollout.metrics()
        assert (stats.pinned_requests, stats.kv_usage, stats.running) == (0, 0.0, 0)
        assert stats.weight_updates_total == 4


@pytest.mark.parametrize("engine", [(1, 1), TP2], ids=["tp1", "tp2"], indirect=True)
def test_where_two_versions_cannot_run_a_pin_is_refused_with_the_remedy(engine, checkpoints):
    live = engine.weight_version
    with pytest.raises(ConfigError, match='use staging="device"'):
        engine.update_weights(checkpoints["b"], in_flight="pin", staging="none")
    for bad in ({"pin_timeout": 99.0}, {"pin_timeout": -1.0}, {"pin_fallback": "wait"}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            engine.update_weights(checkpoints["b"], in_flight="pin", timeout=20, **bad)
    assert engine.weight_version == live
