"""Scheduler and block manager over a model whose tokens depend on every page it reads."""

from __future__ import annotations

from typing import Any

import pytest
from engine_core.bench import Bench
from engine_core.toy_model import WHOLE, continuation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollout.engine.scheduling.block_manager import BlockManager
from rollout.engine.scheduling.cache_root import CacheRoot
from rollout.engine.sequences.sequence import Sequence, Status
from rollout.generation import SamplingParams, VersionSpan
from rollout.models.decoder.kv_groups import KVGroup


def prompt(length: int, first: int = 0) -> list[int]:
    return [(first + i) % 97 for i in range(length)]


def test_chunked_prefill_and_decode_share_one_budget_and_give_the_models_tokens() -> None:
    bench = Bench(budget=8)
    long, short = bench.submit(prompt(21), 6)[0], bench.submit(prompt(3, 50), 6)[0]
    first = bench.step()
    assert [(e.sequence.seq_id, e.num_new) for e in first.entries] == [(0, 8)]
    bench.run()
    assert long.output_token_ids == continuation(prompt(21), 6)
    assert short.output_token_ids == continuation(prompt(3, 50), 6)


def test_decodes_go_before_prefill_chunks() -> None:
    bench = Bench(budget=8)
    bench.submit(prompt(4), 8)
    bench.step()
    bench.submit(prompt(20, 9), 8)
    batch = bench.step()
    assert [(e.sequence.seq_id, e.num_new) for e in batch.entries] == [(0, 1), (1, 7)]


def test_the_newest_sequence_is_preempted_and_its_tokens_stay_the_same() -> None:
    for caching in (True, False):
        bench = Bench(num_blocks=9, budget=64, caching=caching)
        seqs = [bench.submit(prompt(8, 10 * i), 16)[0] for i in range(3)]
        bench.run()
        assert bench.scheduler.preemptions > 0
        for i, seq in enumerate(seqs):
            assert seq.output_token_ids == continuation(prompt(8, 10 * i), 16)
        assert bench.blocks.num_free == 9


def test_a_repeated_prompt_is_found_in_the_cache_but_never_its_last_token() -> None:
    bench = Bench(budget=64)
    bench.submit(prompt(16), 4)
    bench.run()
    again = bench.submit(prompt(16), 4)[0]
    batch = bench.step()
    assert again.num_cached_tokens == 12
    assert batch.num_tokens == 4
    longer = bench.submit(prompt(16) + continuation(prompt(16), 4), 4)[0]
    bench.run()
    assert longer.num_cached_tokens == 16  # 19 of 20 positions were computed: four full blocks


def test_a_reset_between_a_prompts_chunks_lets_no_fork_publish_under_the_new_root() -> None:
    bench = Bench(num_blocks=64, budget=8)
    child = bench.submit(prompt(11), 12, n=2)[1]
    bench.step()  # two full blocks of the prompt; its last chunk fills none
    bench.blocks.reset_prefix_cache()
    bench.run()
    assert child.output_token_ids == continuation(prompt(11), 12)
    alike = bench.submit([*child.token_ids[8:12], 1, 2], 4)[0]
    bench.run()
    assert alike.num_cached_tokens == 0
    assert alike.output_token_ids == continuation([*child.token_ids[8:12], 1, 2], 4)


def test_of_equal_prompts_that_come_together_one_is_computed() -> None:
    bench = Bench(budget=64)
    seqs = [bench.submit(prompt(16), 4)[0] for _ in range(5)]
    other = bench.submit(prompt(9, 50), 4)[0]
    first = bench.step()
    assert [(e.sequence.seq_id, e.num_new) for e in first.entries] == [(0, 16), (5, 9)]
    second = bench.step()
    assert [e.num_new for e in second.entries] == [1, 1, 4, 4, 4, 4]
    bench.run()
    assert {tuple(seq.output_token_ids) for seq in seqs} == {tuple(continuation(prompt(16), 4))}
    assert other.output_token_ids == continuation(prompt(9, 50), 4)


def test_a_long_common_prompt_is_waited_for_over_its_chunks_and_a_short_one_is_not() -> None:
    bench = Bench(budget=10)
    ahead = bench.submit(prompt(24), 2)[0]
    same, barely = bench.submit(prompt(24), 2)[0], bench.submit([*prompt(4), *range(60, 80)], 2)[0]
    assert [(e.sequence.seq_id, e.num_new) for e in bench.step().entries] == [(0, 10)]
    assert [(e.sequence.seq_id, e.num_new) for e in bench.step().entries] == [(0, 10)]
    third = bench.step()
    assert [(e.sequence.seq_id, e.num_new) for e in third.entries] == [(0, 4), (1, 4), (2, 2)]
    bench.run()
    assert (same.num_cached_tokens, barely.num_cached_tokens) == (20, 4)
    assert same.output_token_ids == ahead.output_token_ids == continuation(prompt(24), 2)


def test_who_waits_for_a_prompt_goes_on_when_it_is_taken_away() -> None:
    bench = Bench(budget=8)
    ahead, same = (bench.submit(prompt(24), 3)[0] for _ in range(2))
    bench.step()
    assert same.status is Status.WAITING
    bench.scheduler.finish(ahead)
    bench.run()
    assert same.output_token_ids == continuation(prompt(24), 3)


def test_a_prompt_that_many_wait_for_is_looked_up_once_a_step(monkeypatch) -> None:
    bench = Bench(budget=64)
    for _ in range(6):
        bench.submit(prompt(16), 2)
    found = []
    find = BlockManager.find
    monkeypatch.setattr(
        BlockManager, "find", lambda self, seq: found.append(seq) or find(self, seq)
    )
    bench.step()
    assert [seq.seq_id for seq in found] == [0, 1]  # the others are the same
    del found[:]
    bench.step()
    assert [seq.seq_id for seq in found] == [1, 2, 3, 4, 5]


def test_nobody_waits_for_kv_of_an_earlier_version() -> None:
    bench = Bench(budget=14)
    bench.submit(prompt(24), 3)
    bench.submit(prompt(24), 3)
    bench.step()
    bench.commit()
    second = bench.step()
    assert [(e.sequence.seq_id, e.num_new) for e in second.entries] == [(0, 10), (1, 4)]
    bench.run()


def test_a_prefix_of_another_version_never_matches() -> None:
    bench = Bench(budget=64)
    bench.submit(prompt(16), 4)
    bench.run()
    bench.commit()
    other = bench.submit(prompt(16), 4)[0]
    bench.run()
    assert other.num_cached_tokens == 0
    assert other.output_token_ids == continuation(prompt(16), 4, bench.toy.weights)


def test_every_field_of_a_cache_root_keeps_chains_apart() -> None:
    roots = [CacheRoot(version=v, adapter=a, instance=i)
             for v in (1, 11) for a in ("", "1", "math@3") for i in (0, 1)]  # fmt: skip
    digests = {
        root.digest(salt, chain, 16) for root in roots for salt in (1, 2) for chain in (1, 2)
    }
    assert len(digests) == 4 * len(roots)


def test_under_keep_later_positions_carry_the_new_version_and_are_not_shared() -> None:
    bench = Bench(budget=64)
    seq = bench.submit(prompt(10), 12)[0]
    for _ in range(4):
        bench.step()
    bench.commit("keep")
    bench.run()
    assert seq.weight_versions.spans() == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 12))
    assert seq.kv_spans.spans() == (VersionSpan(0, 0, 13), VersionSpan(1, 13, 21))
    again = bench.submit(seq.token_ids[:20], 1)[0]
    bench.run()
    assert again.num_cached_tokens == 0


def test_a_block_begun_by_one_version_and_filled_by_the_next_is_never_found() -> None:
    bench = Bench(budget=64)
    seq = bench.submit(prompt(2), 12)[0]
    bench.step()
    bench.commit("keep")
    bench.run()
    again = bench.submit(seq.token_ids[:13], 1)[0]
    bench.run()
    assert again.num_cached_tokens == 0


def test_when_nothing_else_is_left_shared_blocks_of_waiting_samples_are_taken_back() -> None:
    bench = Bench(num_blocks=9, budget=64, max_seqs=2, caching=False)
    oldest = bench.submit(prompt(12), 16, n=2)[0]
    waiting = bench.submit(prompt(16, 40), 1, n=2)[1]
    bench.step()
    assert len(waiting.block_table) == 3
    computed = 0
    while oldest.status is not Status.FINISHED:
        assert oldest.num_computed >= computed, "the oldest lost its KV"
        computed = oldest.num_computed
        bench.step()
    assert waiting.num_cached_tokens < 0  # it had to give its share back, and never ran yet
    bench.run()


def test_what_waiting_samples_share_is_taken_from_all_of_a_request_at_once() -> None:
    bench = Bench(num_blocks=32, budget=64, max_seqs=2, caching=False)
    older, newer = bench.submit(prompt(12), 1, n=6), bench.submit(prompt(12, 40), 1, n=6)
    bench.step()

    def holders(samples: list[Sequence]) -> list[Sequence]:
        return [s for s in samples if s.status is Status.WAITING and s.block_table]

    assert len(holders(older)) == len(holders(newer)) == 5
    free = bench.blocks.num_free
    assert bench.scheduler._drop_holders()
    assert (len(holders(older)), len(holders(newer))) == (5, 0)
    assert bench.blocks.num_free == free + 2
    assert bench.scheduler._drop_holders(keep=older[1])
    assert holders(older) == [older[1]]
    assert not bench.scheduler._drop_holders(keep=older[1])
    bench.run()


def test_under_recompute_all_kv_is_of_the_new_version_and_the_output_stays() -> None:
    bench = Bench(budget=64)
    seq = bench.submit(prompt(10), 12)[0]
    for _ in range(4):
        bench.step()
    before = seq.output_token_ids
    bench.commit("recompute")
    bench.run()
    assert seq.output_token_ids[:4] == before
    known = prompt(10) + before
    assert seq.output_token_ids[4:] == continuation(known, 8, bench.toy.weights)
    assert seq.kv_spans.spans() == (VersionSpan(1, 0, 21),)


@pytest.mark.parametrize("caching", [True, False])
def test_samples_of_one_prompt_share_its_full_blocks_and_prefill_it_once(caching: bool) -> None:
    bench = Bench(budget=64, caching=caching)
    samples = bench.submit(prompt(18), 3, n=4)
    first = bench.step()
    assert first.num_tokens == 18
    second = bench.step()
    assert [e.num_new for e in second.entries] == [1, 2, 2, 2]
    assert len({tuple(s.block_table[:4]) for s in samples}) == 1
    assert bench.blocks.num_blocks - bench.blocks.num_free == 4 + 4
    bench.run()
    assert {tuple(s.output_token_ids) for s in samples} == {tuple(continuation(prompt(18), 3))}
    assert samples[1].num_cached_tokens == 16


def test_samples_share_even_when_the_first_ends_with_its_first_token() -> None:
    bench = Bench(budget=64, caching=False)
    bench.submit(prompt(18), 1, n=3)
    bench.step()
    assert [e.num_new for e in bench.step().entries] == [2, 2]
    bench.run()


def test_a_scored_prompt_is_computed_whole() -> None:
    bench = Bench(budget=64)
    bench.submit(prompt(16), 2)
    bench.run()
    bench.submit(prompt(16), 2, scored=True)
    assert bench.step().num_tokens == 16


def test_nothing_runs_while_frozen_and_only_what_has_begun_while_not_admitting() -> None:
    bench = Bench(budget=64, max_seqs=1)
    first, second = bench.submit(prompt(5), 3)[0], bench.submit(prompt(5, 7), 3)[0]
    bench.step()
    bench.scheduler.frozen = True
    assert not bench.step().entries
    bench.scheduler.frozen, bench.scheduler.admitting = False, False
    while not bench.scheduler.drained:
        bench.step()
    assert (first.status, second.status) == (Status.FINISHED, Status.WAITING)
    assert not bench.step().entries
    bench.scheduler.admitting = True
    bench.run()


def test_integrity_check_notices_a_lost_block_and_a_stale_address() -> None:
    bench = Bench()
    seq = bench.submit(prompt(9), 4)[0]
    bench.step()
    seq.block_table[0], kept = seq.block_table[1], seq.block_table[0]
    with pytest.raises(AssertionError):
        bench.check()
    seq.block_table[0] = kept
    bench.check()


def test_after_a_hash_hit_the_tokens_are_compared() -> None:
    blocks = BlockManager(8, 4)
    seqs = [
        Sequence(
            seq_id=i,
            request_id=str(i),
            index=0,
            params=SamplingParams(),
            seed=0,
            prompt_token_ids=prompt(9),
        )
        for i in range(2)
    ]
    assert blocks.admit(seqs[0], blocks.find(seqs[0]))
    seqs[0].advance(9, 0)
    blocks.publish(seqs[0])
    blocks._blocks[seqs[0].block_table[1]].tokens = (9, 9, 9, 9)  # as if two chains collided
    assert blocks.admit(seqs[1], blocks.find(seqs[1]))
    assert seqs[1].num_computed == 4


def test_freed_blocks_are_reused_oldest_first_and_unhashed_ones_before_all() -> None:
    bench = Bench(num_blocks=8, budget=64)
    bench.submit(prompt(8), 1)
    bench.run()
    bench.submit(prompt(8, 40), 1)
    bench.run()
    bench.submit(prompt(20, 70), 1)  # takes the four unhashed blocks and the oldest cached one
    bench.run()
    kept = bench.submit(prompt(9, 40), 1)[0]
    bench.step()
    assert kept.num_cached_tokens == 8


def test_a_prefix_is_taken_up_at_the_nearest_snapshot_of_its_states() -> None:
    bench = Bench(num_blocks=64, snapshots=4)
    assert bench.states is not None
    first = bench.submit(prompt(21), 1)[0]  # snapshots after 8, 16 and 20 tokens
    bench.run()
    assert (first.num_cached_tokens, bench.states.saved, bench.states.num_kept) == (0, 3, 3)
    same = bench.submit(prompt(21), 1)[0]
    bench.run()
    assert same.num_cached_tokens == 20
    branching = [*prompt(13), *prompt(9, 60)]  # three blocks are known, and a state after two
    for wanted in (8, 20):
        seq = bench.submit(branching, 1)[0]
        bench.run()
        assert seq.num_cached_tokens == wanted
    # Behind the third block, where the two part, there is one now: at its second visit.
    other = bench.submit([*prompt(13), *prompt(5, 80)], 1)[0]
    bench.run()
    assert other.num_cached_tokens == 12


@pytest.mark.parametrize(("tokens", "due"), [(22, False), (23, True)])
def test_no_step_is_begun_ahead_after_which_a_snapshot_is_due(tokens: int, due: bool) -> None:
    """Also behind the end of a prompt, which is computed several tokens at once."""
    bench = Bench(num_blocks=64, snapshots=4)
    [seq] = bench.submit(prompt(tokens), 9)
    while seq.num_computed < 20:
        bench.step()
    last = bench.scheduler.schedule()
    assert last.entries[0].num_new == tokens - 20
    assert (not bench.scheduler.schedule_ahead(last).entries) == due


def test_a_state_of_two_versions_is_held_for_forks_and_found_by_nobody() -> None:
    bench = Bench(num_blocks=64, budget=8, snapshots=6)
    assert bench.states is not None
    samples = bench.submit(prompt(21), 3, n=3)
    bench.step()
    bench.commit("keep")
    bench.run()
    spans = [seq.kv_spans.spans() for seq in samples]
    assert all(len(found) == 2 and found[0] == VersionSpan(0, 0, 8) for found in spans), spans
    assert bench.states.num_kept == 0
    assert bench.submit(prompt(21), 1)[0].num_cached_tokens <= 0
    bench.run()


def test_rows_left_out_of_a_step_go_on_from_their_snapshots_in_the_next() -> None:
    for leave_out in (1, 2, 3):  # one of two, the other, and the whole step
        bench = Bench(num_blocks=64, budget=64, snapshots=8)
        bench.submit(prompt(21), 1)
        bench.run()
        same, forked = bench.submit(prompt(21), 4)[0], bench.submit(prompt(21, 40), 4, n=2)[1]
        bench.step(leave_out)
        bench.step(leave_out)
        bench.run()
        assert same.num_cached_tokens == forked.num_cached_tokens == 20


def test_a_row_that_is_left_out_again_and_again_keeps_one_snapshot_slot_and_gives_it_back() -> None:
    bench = Bench(num_blocks=64, budget=64, snapshots=2)
    assert bench.states is not None
    seq = bench.submit(prompt(8), 1)[0]  # a snapshot is due after four
    for _ in range(4):
        assert not bench.step(leave_out=1).entries
    assert seq.saving is not None
    bench.commit("keep")
    bench.step(leave_out=1)
    bench.scheduler.finish(seq)
    bench.check()
    for first in (0, 30, 60):
        bench.submit(prompt(9, first), 1)
        bench.run()
    assert bench.states.saved == 3
    assert bench.states.num_kept == 2


def test_one_snapshot_slot_follows_a_growing_prompt_and_its_step_may_be_put_off() -> None:
    bench = Bench(num_blocks=64, budget=64, max_seqs=1, snapshots=1)
    for length, cached in ((9, 0), (14, 8), (18, 12)):
        seq = bench.submit(prompt(length), 2)[0]
        assert not bench.step(leave_out=1).entries
        bench.run()
        assert seq.num_cached_tokens == cached
    gone = bench.submit(prompt(22), 2)[0]
    assert not bench.step(leave_out=1).entries
    bench.scheduler.finish(gone)
    bench.check()


def test_who_ends_before_its_snapshot_was_restored_leaves_its_slot_to_others() -> None:
    bench = Bench(num_blocks=64, budget=64, max_seqs=1, snapshots=4)
    for first in (0, 40):
        bench.submit(prompt(21, first), 1)
        bench.run()
    gone = bench.submit(prompt(21), 4)[0]
    assert not bench.step(leave_out=1).entries
    bench.scheduler.finish(gone)
    bench.check()
    other = bench.submit(prompt(21, 40), 4)[0]
    bench.run()
    assert other.num_cached_tokens == 20


GROUPS = [
    tuple(KVGroup(layers=(0,), window=window, chunk=chunk) for window, chunk in reaches)
    for reaches in (
        [(6, 0), (0, 0)],
        [(9, 0), (5, 0), (5, 0), (0, 0)],
        [(7, 0)],
        [(0, 8), (0, 0)],
        [(1, 0), (0, 0)],
    )
]
OPS = st.one_of(
    st.tuples(
        st.just("submit"),
        st.integers(1, 30),  # prompt length
        st.integers(0, 2),  # which shared prefix
        st.integers(1, 4),  # n
        st.integers(1, 20),  # max_tokens
        st.booleans(),  # prompt logprobs
    ),
    st.tuples(st.just("step"), st.integers(1, 6), st.just(0) | st.integers(0, 63)),
    st.tuples(st.just("resubmit"), st.integers(0, 50), st.integers(1, 30)),
    st.tuples(st.just("abort"), st.integers(0, 50)),
    st.tuples(st.just("commit"), st.sampled_from(["keep", "recompute", "pin"])),
    st.tuples(st.just("reset")),
)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    ops=st.lists(OPS, max_size=30),
    num_blocks=st.integers(13, 40),
    budget=st.integers(1, 40),
    max_seqs=st.integers(1, 6),
    caching=st.booleans(),
    kind=st.none() | st.integers(0, 5) | st.sampled_from(GROUPS),
)
def test_any_history_keeps_the_books_and_gives_the_models_tokens(
    ops: list[tuple[Any, ...]],
    num_blocks: int,
    budget: int,
    max_seqs: int,
    caching: bool,
    kind: int | tuple[KVGroup, ...] | None,
) -> None:
    """``kind``: of a model with so many snapshots of states, or with groups of layers."""
    groups = kind if isinstance(kind, tuple) else WHOLE
    snapshots = kind if isinstance(kind, int) else None
    num_blocks *= len(groups)
    bench = Bench(num_blocks, 4, budget, max_seqs, caching, snapshots, groups)
    for op in ops:
        match op:
            case ("submit", length, prefix, n, max_tokens, scored):
                bench.submit(prompt(length, 30 * prefix), max_tokens, n, scored)
            case ("resubmit", which, length) if bench.all:
                known = bench.all[which % len(bench.all)].token_ids
                bench.submit(known[:length], 4)
            case ("step", count, leave_out):
                for _ in range(count):
                    bench.step(leave_out)
            case ("abort", which):
                if live := [s for s in bench.all if s.status is not Status.FINISHED]:
                    bench.scheduler.finish(live[which % len(live)])
            case ("commit", in_flight):
                bench.commit(in_flight)
            case ("reset",):
                bench.blocks.reset_prefix_cache()
        bench.check()
    bench.run()
    assert bench.blocks.num_free == num_blocks
