"""``async_scheduling``: the ranks get step N+1 while N runs, and nobody sees a difference.

All of this folder's tests of the whole engine run in both ways; here is what only this one does.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest
from engine_core.harness import (
    PROMPT,
    Sink,
    Start,
    comparable,
    random_requests,
    request,
    run,
)
from engine_core.toy_model import ToyExecutor

from rollout.engine.core import EngineCore

pytestmark = pytest.mark.parametrize("start", [True], ids=["ahead"], indirect=True)


@pytest.fixture
def toy() -> Iterator[ToyExecutor]:
    toy = ToyExecutor()
    yield toy
    toy.gate.set()


def halted(core: EngineCore, toy: ToyExecutor, *requests: Any, under_way: int) -> Sink:
    """Requests whose ranks stand still after five steps, with so many more begun."""
    sink = Sink(len(requests))
    toy.halt_at = toy.steps + 5
    core.submit(requests, sink, stream=True)
    deadline = time.monotonic() + 10
    while toy.gate.is_set() or toy.begun - toy.steps < under_way:
        assert time.monotonic() < deadline, f"{toy.begun} steps begun, {toy.steps} ended"
        time.sleep(0.005)
    time.sleep(0.1)  # in which another one might begin
    assert toy.begun - toy.steps == under_way
    return sink


def test_a_step_is_begun_while_one_runs_and_no_more_than_one(start: Start, toy: ToyExecutor):
    core = start(toy)
    sink = halted(core, toy, request(max_tokens=200), under_way=2)
    toy.gate.set()
    sink.results()
    assert core.loop.steps_ahead > 100
    assert toy.begun == toy.steps == core.counters.steps


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 1.1}, {"presence_penalty": 0.5}, {"frequency_penalty": -0.5}],
    ids=str,
)
def test_penalties_need_the_last_token_first(start: Start, toy: ToyExecutor, params) -> None:
    core = start(toy)
    calls = request("a", max_tokens=100), request("b", max_tokens=100, **params)
    sink = halted(core, toy, *calls, under_way=1)
    toy.gate.set()
    sink.results()


def test_what_was_asked_for_waits_for_the_step_that_was_begun(start: Start, toy: ToyExecutor):
    """And no other one is begun before it."""
    core = start(toy)
    sink = halted(core, toy, request(max_tokens=200), under_way=2)
    under_way = toy.begun
    steps = core.at_step_boundary(lambda: (toy.begun, toy.steps))
    toy.gate.set()
    assert steps.result(5) == (under_way, under_way)
    sink.results()


@pytest.mark.parametrize("room", [{"max_num_seqs": 2}, {"num_kv_blocks": 30}], ids=str)
def test_steps_are_begun_ahead_while_those_who_wait_find_no_room(
    start: Start, toy: ToyExecutor, room: dict[str, int]
) -> None:
    core = start(toy, **room)
    calls = [request(str(i), [i] * 40, max_tokens=12) for i in range(3)]
    sink = halted(core, toy, *calls, under_way=2)
    assert core.scheduler.num_waiting == 1
    toy.gate.set()
    sink.results()


def test_a_place_that_is_sure_to_be_free_is_waited_for(start: Start, toy: ToyExecutor) -> None:
    """Then no step runs with it empty."""
    core = start(toy, max_num_seqs=1)
    sink = Sink(2)
    core.submit([request("a", max_tokens=9), request("b", max_tokens=9)], sink, stream=False)
    sink.results()
    assert core.loop.steps_ahead > 0
    assert core.counters.steps == toy.steps == 2 * 9


def test_a_sequence_that_ends_unforeseen_is_computed_once_in_vain(start: Start, toy) -> None:
    core = start(toy)
    plain = run(core, request(max_tokens=60))["a"].outputs[0]
    in_turn, stop = toy.steps, plain.token_ids[30]
    first = plain.token_ids.index(stop)
    core.control.reset_prefix_cache().result()
    cut = run(core, request(max_tokens=60, stop_token_ids=(stop,)))["a"].outputs[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == plain.token_ids[: first + 1]
    steps = core.at_step_boundary(lambda: toy.steps).result(5)  # after the one in vain
    assert steps == in_turn + first + 1 + 1
    assert cut.kv_spans[-1].stop == len(PROMPT) + first
    assert core.blocks.usage == 0
    core.scheduler.check_integrity()


def outputs(core: EngineCore, seed: int) -> dict[str, Any]:
    """What a fixed random set of requests gives, in three batches."""
    rng, found = random.Random(seed), {}
    for batch in range(3):
        requests = random_requests(rng, f"{batch}.")
        found |= {name: comparable(out) for name, out in run(core, *requests).items()}
        core.scheduler.check_integrity()
    return found


@pytest.mark.parametrize("seed", range(12))
def test_everything_comes_out_as_in_turn(start: Start, seed: int) -> None:
    rng = random.Random(seed)
    settings = {
        "num_kv_blocks": rng.choice([24, 40, 80]),
        "max_num_batched_tokens": rng.choice([4, 16, 2048]),
        "max_num_seqs": rng.choice([2, 8, 64]),
        "max_model_len": 80,
    }
    ahead, in_turn = start(**settings), start(async_scheduling=False, **settings)
    assert outputs(ahead, seed) == outputs(in_turn, seed)
    assert ahead.loop.steps_ahead > 0 == in_turn.loop.steps_ahead
