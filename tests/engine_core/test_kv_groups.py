"""Blocks of layers that forget what a window has left behind: given back, found again, too few."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from engine_core.bench import Bench
from engine_core.harness import Start, commit, held, request, run
from engine_core.toy_model import VOCAB, WHOLE, ToyExecutor

from rollout.config import EngineConfig
from rollout.engine.memory_plan import size_kv
from rollout.engine.scheduling.block_manager import chained
from rollout.errors import ConfigError
from rollout.models.decoder.kv_groups import KVGroup

SLIDING = KVGroup(layers=(0, 1), window=6)
FULL = KVGroup(layers=(2, 3))
TWO = (SLIDING, FULL)


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 97 for i in range(length)]


def in_use(bench: Bench) -> int:
    return bench.blocks.num_blocks - bench.blocks.num_free


def test_a_long_sequence_holds_a_window_of_the_layers_that_forget() -> None:
    for groups, full in ((TWO, 1), ((SLIDING, SLIDING, FULL), 1), ((SLIDING,), 0)):
        bench, few = Bench(num_blocks=99, budget=64, groups=groups), len(groups) - full
        seq = bench.submit(prompt(41), 30)[0]
        for position in range(41, 70):
            bench.step()
            # The next position sees five before it: in two blocks, or in three.
            reach = -(-seq.num_computed // 4) - (seq.num_computed - 5) // 4
            assert in_use(bench) == few * reach + full * -(-seq.num_computed // 4), position
        bench.run()
        assert bench.blocks.num_free == 99


def test_chunks_of_a_long_prompt_take_turns_in_few_blocks() -> None:
    bench = Bench(num_blocks=26 + 5, budget=8, groups=TWO)  # without windows it takes 52
    seq = bench.submit(prompt(99), 4)[0]
    bench.run()
    assert seq.output_len == 4
    assert bench.scheduler.preemptions == 0


def test_a_prefix_is_known_where_its_last_window_is() -> None:
    bench = Bench(num_blocks=40, budget=64, groups=TWO)
    bench.submit(prompt(32), 1)
    bench.run()
    for length in (33, 21, 9):  # what the window left is free and can be found yet
        again = bench.submit(prompt(length), 1)[0]
        bench.run()
        assert again.num_cached_tokens == (length - 1) // 4 * 4
    # The oldest free blocks are those of the window's beginning.
    small = Bench(num_blocks=14, budget=64, groups=TWO)
    small.submit(prompt(24), 1)
    small.run()
    for length, cached in ((20, 16), (25, 24)):
        again = small.submit([*prompt(length - 1), 96], 1)[0]
        small.step()
        assert again.num_cached_tokens == cached, length
        small.run()
    middle = small.submit([*prompt(9), 96], 1)[0]
    small.step()
    assert middle.num_cached_tokens in (0, 4, 8)
    small.run()


def test_samples_share_the_last_window_of_their_prompt() -> None:
    for length in (32, 33, 34, 35):
        for budget in (8, 31, 64):
            bench = Bench(num_blocks=60, budget=budget, groups=TWO)
            samples = bench.submit(prompt(length), 6, n=4)
            while samples[0].forks:
                bench.step()
            whole = (length - 1) // 4
            assert all(len(seq.block_table) >= whole for seq in samples)
            assert len({tuple(seq.more_tables[0][:whole]) for seq in samples}) == 1
            bench.run()
            assert len({tuple(seq.output_token_ids) for seq in samples}) == 1


def test_a_prefill_that_finds_no_block_takes_those_of_one_that_waits() -> None:
    """They share a window: what one gives back the other holds."""
    bench = Bench(num_blocks=32, budget=8, groups=TWO)
    seq = bench.submit(prompt(60), 3)[0]
    for _ in range(2):
        bench.step()
    waits = bench.submit(prompt(60), 3)[0]  # as a sample that has its share of the prompt
    assert bench.blocks.admit(waits, bench.blocks.find(waits))
    assert waits.block_table
    while seq.num_computed < 60:
        bench.step()
    assert not waits.block_table
    bench.run()


@pytest.fixture
def toy() -> Iterator[ToyExecutor]:
    toy = ToyExecutor(groups=(SLIDING, SLIDING, FULL))
    yield toy
    toy.gate.set()


@pytest.mark.parametrize("in_flight", ["keep", "pin", "recompute"])
def test_commits_pauses_and_a_reset_change_no_token_that_they_should_not(
    start: Start, toy: ToyExecutor, in_flight: str
) -> None:
    core = start(toy)
    plain = run(core, request(max_tokens=40), request("b", max_tokens=40))["a"].outputs[0]
    sink = held(core, 12, max_tokens=40)
    commit(core, 1, in_flight)
    toy.contents[1] = toy.weights = 0  # the same weights under another version
    core.control.resume().result()
    after = sink.results()["a"].outputs[0]
    assert after.token_ids == plain.token_ids
    core.control.reset_prefix_cache().result()
    assert run(core, request(max_tokens=40))["a"].outputs[0].token_ids == plain.token_ids
    assert core.blocks.num_free == core.num_kv_blocks
    core.scheduler.check_integrity()


def test_steps_begun_ahead_give_what_steps_in_turn_give(start: Start) -> None:
    found: list[Any] = []
    for ahead in (False, True):
        toy = ToyExecutor(groups=(SLIDING, SLIDING, FULL))
        core = start(toy, async_scheduling=ahead, num_kv_blocks=80, max_num_batched_tokens=16)
        rng = random.Random(1)
        for batch in range(2):
            calls = [
                request(
                    f"{batch}.{i}",
                    [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))],
                    max_tokens=rng.randint(1, 30),
                    n=rng.choice([1, 3]),
                    stop_token_ids=tuple(rng.sample(range(VOCAB), 3)),
                )
                for i in range(9)
            ]
            outs = run(core, *calls)
            found.append([[s.token_ids for s in outs[c.request_id].outputs] for c in calls])
            core.scheduler.check_integrity()
        assert core.blocks.num_free == 80
    assert found[:2] == found[2:]


def test_sizes_follow_what_a_sequence_holds() -> None:
    """One of 4096 tokens: 128 blocks of the full group, and of each other 256 + 2048 + 1 ahead."""
    mib = 1 << 20
    reply = {
        "device": "cpu", "weight_bytes": 0, "free_bytes": 1 << 34, "kv_block_bytes": mib,
        "kv_groups": [[5, 256, 0], [5, 256, 0], [4, 0, 0]],
    }  # fmt: skip

    def sized(**settings: Any) -> Any:
        return size_kv(EngineConfig(model="m", staging="none", **settings), 4096, [reply])

    need = 2 * 73 + 128
    size = sized(num_kv_blocks=need, max_model_len=4096)
    assert size.max_model_len == 4096
    assert "holds 274.0 MiB" in size.windows
    assert "358.4 MiB without windows" in size.windows  # of 14 layers in pages of five
    with pytest.raises(ConfigError, match="needs 274 KV blocks"):
        sized(num_kv_blocks=need - 1, max_model_len=4096)
    assert sized(num_kv_blocks=need - 1).max_model_len == 4096 - 32
    assert sized(num_kv_blocks=need, max_num_batched_tokens=256, max_num_seqs=8).windows
    alone = {**reply, "kv_groups": [[5, 256, 0]]}
    config = EngineConfig(model="m", staging="none", num_kv_blocks=73)
    assert size_kv(config, 1 << 20, [alone]).max_model_len == 1 << 20


def test_blocks_that_take_no_memory_are_as_many_as_can_be_in_use() -> None:
    """Of a model of recurrent states alone, whatever bytes were asked for."""
    reply = {
        "device": "cpu", "weight_bytes": 0, "free_bytes": 1 << 34, "kv_block_bytes": 0,
        "state_slot_bytes": 1 << 10,
    }  # fmt: skip
    for asked in ({}, {"kv_cache_bytes": 1 << 30}, {"kv_cache_bytes": 1}):
        config = EngineConfig(model="m", staging="none", block_size=32, max_num_seqs=4, **asked)
        assert size_kv(config, 4096, [reply]).num_blocks == 4 * 4096 // 32


@pytest.mark.parametrize("groups", [(SLIDING,), TWO, WHOLE], ids=["sliding", "two", "whole"])
def test_a_sequence_that_waits_is_hashed_once(groups: tuple[KVGroup, ...], monkeypatch) -> None:
    """However often its prefix is looked up: anew where the cache starts anew, else what is new."""
    bench, hashed = Bench(num_blocks=60, budget=64, groups=groups), list[tuple[int, ...]]()
    bench.submit(prompt(61), 1)
    bench.run()
    [seq] = bench.submit(prompt(61), 1)

    def counted(parent: bytes, tokens: tuple[int, ...]) -> bytes:
        hashed.append(tokens)
        return chained(parent, tokens)

    for module in ("block_manager", "grouped_blocks"):
        monkeypatch.setattr(f"rollout.engine.scheduling.{module}.chained", counted)
    found = bench.blocks.find(seq)
    assert len(found.blocks) == len(hashed) == 15
    assert bench.blocks.find(seq) == found
    assert len(hashed) == 15
    for token in range(5):
        seq.append(token, 0, 0.0, 0.0, 0.0)
    assert bench.blocks.find(seq).blocks == found.blocks
    assert len(hashed) == 16
    bench.commit()
    assert bench.blocks.find(seq).blocks == []
    assert len(hashed) == 16 + (16 if groups == (SLIDING,) else 1)
