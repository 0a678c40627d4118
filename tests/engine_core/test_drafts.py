"""Drafts that a step verifies: nobody sees a difference, whatever was drafted and however wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
from engine_core.harness import (
    PROMPT,
    Sink,
    Start,
    commit,
    comparable,
    held,
    random_requests,
    request,
    run,
)
from engine_core.toy_model import VOCAB, WHOLE, ToyExecutor, chain

from rollout.engine.scheduling.drafter import Draft
from rollout.engine.scheduling.ngram_drafter import NgramDrafter
from rollout.engine.sequences.sequence import Sequence
from rollout.errors import ConfigError, EngineError
from rollout.generation import RequestOutput
from rollout.models.decoder.kv_groups import KVGroup

WINDOWS = (KVGroup(layers=(0, 1), window=6), KVGroup(layers=(2, 3)))


class Told:
    """Drafts what is known to come, some of it wrong."""

    def __init__(
        self, seed: int, outputs: dict[str, RequestOutput], wrong: float, most: int = 6
    ) -> None:
        self.rng, self.wrong, self.verdicts, self.most = random.Random(seed), wrong, [0, 0], most
        self.known = {
            (name, one.index): one.token_ids for name, out in outputs.items() for one in out.outputs
        }

    def begin(self, seq: Sequence) -> None: ...

    def finish(self, seq: Sequence) -> None: ...

    def draft(self, seq: Sequence, room: int) -> Draft:
        count = min(room, self.rng.randint(0, self.most), seq.max_len - seq.num_tokens - 1)
        ahead = self.known[seq.request_id, seq.index][seq.output_len :][: max(count, 0)]
        ahead += [self.rng.randrange(VOCAB)] * (count - len(ahead))  # after a stop
        return Draft(
            tuple(
                self.rng.randrange(VOCAB) if self.rng.random() < self.wrong else token
                for token in ahead
            )
        )

    def judge(self, seq: Sequence, drafted: int, accepted: int) -> None:
        self.verdicts[accepted == drafted] += 1


@pytest.mark.parametrize("groups", [WHOLE, WINDOWS], ids=["whole", "windows"])
@pytest.mark.parametrize("seed", range(6))
def test_everything_comes_out_as_without(start: Start, seed: int, groups: Any) -> None:
    rng = random.Random(seed)
    settings = {
        "num_kv_blocks": rng.choice([44, 80]),
        "max_num_batched_tokens": rng.choice([8, 16, 2048]),
        "max_num_seqs": rng.choice([2, 8]),
        "max_model_len": 80,
    }
    plain = start(ToyExecutor(groups=groups), **settings)
    few = seed % 2 == 0
    drafts = {"num_speculative_tokens": 6, "speculative_max_num_seqs": 1 if few else 8}
    drafting = start(ToyExecutor(groups=groups), **drafts, **settings)
    wanted = run(plain, *random_requests(random.Random(seed)))
    told = drafting.scheduler.drafter = Told(seed, wanted, wrong=rng.choice([0.0, 0.2, 1.0]))
    found = run(drafting, *random_requests(random.Random(seed)))
    assert {n: comparable(o) for n, o in found.items()} == {
        n: comparable(o) for n, o in wanted.items()
    }
    assert drafting.counters.drafts == sum(told.verdicts)
    assert drafting.counters.drafts or few
    assert drafting.counters.accepted_tokens <= drafting.counters.draft_tokens
    assert drafting.counters.generation_tokens == plain.counters.generation_tokens
    assert drafting.blocks.usage == 0
    drafting.scheduler.check_integrity()


@pytest.mark.parametrize("in_flight", ["keep", "recompute"])
def test_a_commit_between_steps_finds_no_draft(start: Start, in_flight: str) -> None:
    core = start(num_speculative_tokens=5, num_kv_blocks=80)
    first = run(core, request(max_tokens=150))
    commit(core, 1)
    commit(core, 2)
    core.scheduler.drafter = Told(3, first, wrong=0.1)
    sink = Sink()
    core.submit([request(max_tokens=150)], sink, stream=True)
    sink.wait_for(3)
    commit(core, 3, in_flight)
    out = sink.results()["a"].outputs[0]
    tokens = [*PROMPT, *out.token_ids]
    weights = [s.version for s in out.kv_spans for _ in range(s.start, s.stop)]
    drew = [s.version for s in out.weight_versions for _ in range(s.start, s.stop)]
    assert len(weights) == len(tokens) - 1
    assert len(drew) == 150
    if in_flight == "keep":
        states = chain(tokens[:-1], weights)
        assert out.token_ids == [state % VOCAB for state in states[len(PROMPT) - 1 :]]
    else:
        assert set(weights) == {3}
    core.scheduler.check_integrity()


@pytest.mark.parametrize("read", ["bad", "good"])
def test_a_step_goes_on_without_what_the_draft_model_was_to_read(start: Start, read: str) -> None:
    """And who cannot be encoded is told apart from whom it reads nothing of."""

    class Reads(Told):
        def draft(self, seq: Sequence, room: int) -> Draft:
            return Draft(context=range(seq.num_tokens if seq.request_id == read else 0))

    core = start(num_speculative_tokens=5)
    core.scheduler.drafter = Reads(0, {}, 0.0)
    good, bad = Sink(2), Sink()
    broken = request("bad", max_tokens=100)
    core.submit([request("good", max_tokens=60), request("b", max_tokens=60)], good, stream=False)
    core.submit([broken], bad, stream=True)
    bad.wait_for(3)
    core.at_step_boundary(lambda: object.__setattr__(broken.params, "top_k", 10**30)).result(30)
    with pytest.raises(EngineError, match="'bad' cannot be encoded: OverflowError"):
        bad.results()
    assert {len(out.outputs[0].token_ids) for out in good.results().values()} == {60}


def test_drafts_that_are_right_save_steps(start: Start) -> None:
    core = start(num_speculative_tokens=5, speculative_history_tokens=1000)
    first = run(core, request(max_tokens=61))["a"]
    before = core.counters.steps
    again = run(core, request(max_tokens=61))["a"]
    assert again.outputs[0].token_ids == first.outputs[0].token_ids
    assert core.counters.steps - before == 1 + 60 / 6
    assert core.counters.accepted_tokens == 50


def test_a_prompt_drafts_from_samples_that_are_ahead(start: Start) -> None:
    """Also from those of other calls; those of another prompt do not."""
    core = start(num_speculative_tokens=5)
    sink = Sink()
    core.submit([request("a", max_tokens=200)], sink, stream=True)
    sink.wait_for(40)
    run(core, request("b", [1, 2, 3], max_tokens=10))
    assert core.counters.accepted_tokens < 5
    run(core, request("c", max_tokens=40))
    assert core.counters.accepted_tokens > 20
    sink.results()


def test_the_history_keeps_what_was_said_last(start: Start) -> None:
    core = start(num_speculative_tokens=5, speculative_history_tokens=150)
    drafter = core.scheduler.drafter
    assert drafter is not None

    def accepted(prompt: int) -> int:
        before = core.counters.accepted_tokens
        run(core, request(prompt=[prompt] * 5, max_tokens=50))
        return core.counters.accepted_tokens - before

    assert accepted(1) == accepted(2) == 0
    assert accepted(1) > 30
    assert accepted(3) == accepted(4) == accepted(2) == 0  # in the places of 2, and of 1
    assert accepted(4) > 30


def test_what_ended_among_many_is_drafted_from_too(start: Start) -> None:
    """Nothing is looked through while so many run; what they said is not lost."""
    core = start(num_speculative_tokens=5, speculative_max_num_seqs=1)
    ahead, others = held(core, 30, max_tokens=90), Sink(2)
    calls = [request("late", max_tokens=90), request("other", [1], max_tokens=60)]
    core.submit(calls, others, stream=False)
    core.control.resume().result()
    ahead.results()
    others.results()
    assert core.counters.accepted_tokens > 20  # once it alone runs, of what the first had said


def test_the_history_has_what_was_said_while_too_many_decoded_for_drafts(start: Start) -> None:
    core = start(
        num_speculative_tokens=5, speculative_max_num_seqs=1, speculative_history_tokens=1000
    )
    calls = [request(str(i), [i] * 5, max_tokens=50) for i in range(3)]
    run(core, *calls)
    assert core.counters.accepted_tokens == 0
    for count, call in enumerate(calls, 1):
        run(core, call)
        assert core.counters.accepted_tokens > 30 * count


def test_more_sequences_than_that_draft_nothing(start: Start) -> None:
    """Their steps may be begun ahead; once so few are left none is, and drafts begin."""
    core = start(num_speculative_tokens=5, speculative_max_num_seqs=2, max_num_seqs=8)
    run(core, request(n=3, max_tokens=50))
    assert core.counters.drafts == 0
    assert core.counters.steps == 51  # the others have their prompt's last token again
    assert (core.loop.steps_ahead > 0) == core.loop.runs_ahead
    longest = request("long", max_tokens=100)
    known = run(core, longest)
    core.scheduler.drafter = Told(1, known, wrong=0.0)
    before, ahead = core.counters.steps, core.loop.steps_ahead
    run(core, longest, request("b", [1], max_tokens=40), request("c", [2], max_tokens=40))
    assert core.counters.drafts > 0
    assert core.counters.steps - before < 80
    assert (core.loop.steps_ahead > ahead) == core.loop.runs_ahead


def test_nobody_is_preempted_for_a_draft(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences that fit, as long as none holds blocks for tokens that it does not have."""
    core = start(num_speculative_tokens=6, num_kv_blocks=5, max_model_len=20)
    core.scheduler.drafter = told = Told(1, {}, wrong=0.0)
    monkeypatch.setattr(
        told,
        "draft",
        lambda seq, room: Draft((0,) * min(6, room, seq.max_len - seq.num_tokens - 1)),
    )
    run(core, request("a", [1] * 4, max_tokens=12), request("b", [2] * 7, max_tokens=4))
    assert core.counters.drafts > 0
    assert core.scheduler.preemptions == 0


@pytest.mark.parametrize("groups", [WHOLE, WINDOWS], ids=["whole", "windows"])
def test_what_a_draft_took_is_given_back(start: Start, groups: Any) -> None:
    """Each of these ends early, so that they fit: also where all that could come is drafted."""
    settings = {"num_kv_blocks": 16 * len(groups), "max_model_len": 64, "max_num_seqs": 3}
    prompts = [[i] * 4 for i in range(3)]
    calls = [request(str(i), p, max_tokens=14 + 4 * i) for i, p in enumerate(prompts)]
    plain = start(ToyExecutor(groups=groups), **settings)
    known = run(plain, *calls)
    stops = [[known[call.request_id].outputs[0].token_ids[-1]] for call in calls]
    calls = [
        request(str(i), prompt, max_tokens=60, stop_token_ids=stop, min_tokens=14 + 4 * i)
        for i, (prompt, stop) in enumerate(zip(prompts, stops, strict=True))
    ]
    core = start(ToyExecutor(groups=groups), num_speculative_tokens=40, **settings)
    core.scheduler.drafter = Told(1, known, wrong=1.0, most=40)
    found = run(core, *calls)
    assert {n: o.outputs[0].token_ids for n, o in found.items()} == {
        n: o.outputs[0].token_ids for n, o in known.items()
    }
    assert core.counters.drafts > 0
    assert core.scheduler.preemptions == plain.scheduler.preemptions == 0


def test_drafts_leave_the_budget_of_a_step_to_prompts(start: Start) -> None:
    """A prompt that is computed while every draft is right does not wait for the end of them."""
    core = start(
        num_speculative_tokens=16, speculative_history_tokens=1000, max_num_batched_tokens=16
    )
    run(core, request(max_tokens=150))
    sink = Sink(2)
    core.submit([request(max_tokens=150), request("b", [1] * 50, max_tokens=1)], sink, stream=False)
    sink.results()
    assert [item.request_id for item in sink.items if isinstance(item, RequestOutput)] == ["b", "a"]
    assert core.counters.accepted_tokens > 100


def test_repetition_is_drafted_to_any_length() -> None:
    drafter = NgramDrafter(7, 2, 3)
    seq = begun(drafter, [1, 2, 3, 1, 2, 3, 1, 2])
    assert drafter.draft(seq, 99).tokens == (3, 1, 2, 3, 1, 2, 3)
    assert drafter.draft(seq, 2).tokens == (3, 1)
    seq.max_len = 10
    assert drafter.draft(seq, 99).tokens == (3,)


def test_the_next_draft_is_as_long_as_the_last_was_right() -> None:
    drafter = NgramDrafter(7, 2, 3)
    seq = begun(drafter, [1, 2, 3, 1, 2, 3, 1, 2])
    for right, coming in ((7, 7), (3, 3), (1, 1), (1, 3), (3, 5)):
        drafter.judge(seq, len(drafter.draft(seq, 99).tokens), right)
        assert len(drafter.draft(seq, 99).tokens) == coming
    for waits in (1, 2, 4, 8, 8):  # one that is all wrong comes later, each time
        drafter.judge(seq, len(drafter.draft(seq, 99).tokens), 0)
        assert [drafter.draft(seq, 99).tokens for _ in range(waits)] == [()] * waits
        assert drafter.draft(seq, 99).tokens == (3,)
    drafter.judge(seq, 1, 1)
    assert len(drafter.draft(seq, 99).tokens) == 3


def test_the_longest_run_says_what_follows() -> None:
    drafter = NgramDrafter(2, 1, 3)
    assert drafter.draft(begun(drafter, [7, 1, 2, 3, 50, 60, 8, 2, 3, 51, 1, 2, 3]), 9).tokens == (
        50,
        60,
    )
    assert drafter.draft(begun(drafter, [7, 1, 2, 3, 50, 60, 8, 2, 3, 51, 9, 3]), 9).tokens == (
        51,
        9,
    )
    assert drafter.draft(begun(drafter, [7, 1, 2, 3]), 9).tokens == ()


def test_a_history_that_holds_one_epoch_serves_every_next_one(start: Start) -> None:
    core = start(num_speculative_tokens=5, speculative_history_tokens=6 * 55)
    for epoch in range(5):
        for prompt in range(5):
            run(core, request(prompt=[prompt] * 5, max_tokens=50))
        assert core.counters.accepted_tokens >= 150 * epoch


def test_the_history_counts_the_prompt_of_a_group_once() -> None:
    drafter = NgramDrafter(2, 1, 3, history=250)
    group = [begun(drafter, list(range(100))) for _ in range(12)]
    for number, seq in enumerate(group):
        seq.token_ids += [500 + number, 0, 600 + number]
        drafter.finish(seq)
    first = begun(drafter, list(range(100)))
    first.token_ids.append(500)
    assert drafter.draft(first, 9).tokens == (0, 600)


def test_texts_of_a_prompt_that_always_runs_do_not_grow_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout.engine.scheduling.ngram_drafter._MOST_OF_ONE", 100)
    drafter = NgramDrafter(2, 1, 3)
    before = begun(drafter, [1, 2, 3])
    for _ in range(50):
        seq = begun(drafter, [1, 2, 3])
        before.token_ids += range(20)
        drafter.finish(before)
        assert seq.drafting is not None
        assert seq.drafting.texts.num_tokens <= 140
        before = seq


def begun(drafter: NgramDrafter, tokens: list[int]) -> Sequence:
    params = request(max_tokens=9).params
    seq = Sequence(
        seq_id=0, request_id="a", index=0, params=params, seed=0, prompt_token_ids=tokens
    )
    drafter.begin(seq)
    return seq


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"num_speculative_tokens": 65}, "num_speculative_tokens must be at most 64"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens must be an integer, 0 or more"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min=5 is above prompt_lookup_max=4"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_are_refused(
    start: Start, settings: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        start(**settings)
