"""Drafts by prompt lookup on real models: the tokens, and all that comes with them, stay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drafted import ENGINE as _ENGINE
from drafted import answers, logprobs
from tiny_models import write_tiny

from rollout import RequestOutput, Rollout, SamplingParams
from rollout.engine.scheduling.drafter import Draft
from rollout.engine.scheduling.ngram_drafter import NgramDrafter
from rollout.engine.sequences.sequence import Sequence
from rollout.errors import ConfigError
from rollout.generation import VersionSpan

pytestmark = pytest.mark.usefixtures("forked_ranks")

ENGINE = _ENGINE | {"enable_prefix_caching": False}
DRAFTS = {"num_speculative_tokens": 5, "speculative_history_tokens": 10_000}
HEAD = [7, 3, 11, 200, 5, 9, 42, 17] * 3
PROMPTS = [HEAD, [*HEAD[:19], 3, 4], [90, 91] * 4]
SAMPLED = SamplingParams(max_tokens=40, temperature=0.7, seed=3, n=2, logprobs=2, ignore_eos=True)


def twice(engine: Rollout, params: SamplingParams) -> list[RequestOutput]:
    """The second answer, which is mostly drafted from the first."""
    first = engine.generate(PROMPTS, params)
    before = engine.metrics()
    again = engine.generate(PROMPTS, params)
    now = engine.metrics()
    assert answers(again) == answers(first)
    taken = now.spec_accepted_tokens_total - before.spec_accepted_tokens_total
    tokens = now.generation_tokens_total - before.generation_tokens_total
    assert taken > tokens / 2
    assert now.steps_total - before.steps_total < tokens / len(answers(again))
    return again


# Windows, chunks of attention, an index of tokens, sinks and latent attention, states in the place
# of attention and beside it among them.
@pytest.mark.parametrize(
    "architecture",
    [
        *("qwen3", "gpt_oss", "deepseek_v32", "qwen3_next", "falcon_h1"),
        *(
            pytest.param(name, marks=pytest.mark.more)
            for name in ("gemma3", "llama4", "qwen3_5", "nemotron_h", "kimi_linear", "bamba")
        ),
    ],
)
def test_tokens_are_those_that_come_without(tmp_path: Path, architecture: str) -> None:
    write_tiny(tmp_path, architecture)
    with Rollout(str(tmp_path), **ENGINE) as plain, Rollout(
        str(tmp_path), **ENGINE, **DRAFTS
    ) as drafting:  # fmt: skip
        wanted, found = plain.generate(PROMPTS, SAMPLED), twice(drafting, SAMPLED)
        assert answers(found) == answers(wanted)
        assert np.abs(logprobs(found) - logprobs(wanted)).max() < 1e-5


def test_bits_are_those_that_come_without_where_they_depend_on_no_batch(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    settings = {**ENGINE, "deterministic": True}
    with Rollout(str(tmp_path), **settings) as plain:
        wanted = plain.generate(PROMPTS, SAMPLED)
    with Rollout(str(tmp_path), **settings, **DRAFTS) as drafting:
        found = twice(drafting, SAMPLED)
    for one, other in zip(wanted, found, strict=True):
        assert [s.logprobs for s in one.outputs] == [s.logprobs for s in other.outputs]


def test_experts_and_kept_sets_are_of_the_right_tokens(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3_moe")
    params = SamplingParams(
        max_tokens=40, temperature=0.8, top_p=0.8, seed=3, n=2, ignore_eos=True,
        return_routed_experts=True, return_sampling_mask=True,
    )  # fmt: skip
    with Rollout(str(tmp_path), **ENGINE) as plain:
        wanted = plain.generate(PROMPTS, params)
    with Rollout(str(tmp_path), **ENGINE, **DRAFTS) as drafting:
        found = twice(drafting, params)
    for out, other in zip(wanted, found, strict=True):
        for one, same in zip(out.outputs, other.outputs, strict=True):
            assert one.token_ids == same.token_ids
            assert np.array_equal(one.routed_experts, same.routed_experts)
            assert np.array_equal(one.sampling_mask.counts, same.sampling_mask.counts)
            assert np.array_equal(one.sampling_mask.token_ids, same.sampling_mask.token_ids)


def test_stops_in_the_midst_of_a_draft_end_there(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    with Rollout(str(tmp_path), **ENGINE, **DRAFTS) as engine:
        [whole] = engine.generate(PROMPTS[:1], SamplingParams(max_tokens=40, temperature=0.0))
        tokens = whole.outputs[0].token_ids
        stop = tokens[10]
        at = tokens.index(stop)
        params = SamplingParams(max_tokens=40, temperature=0.0, stop_token_ids=[stop])
        [cut] = engine.generate(PROMPTS[:1], params)
        assert cut.outputs[0].token_ids == tokens[: at + 1]
        assert cut.outputs[0].stop_reason == stop
        assert cut.outputs[0].kv_spans[-1].stop == len(HEAD) + at
        assert [len(cut.outputs[0].logprobs.raw)] == [at + 1]


@pytest.mark.parametrize(
    "architecture", ["qwen3", pytest.param("qwen3_next", marks=pytest.mark.more)]
)
def test_an_update_is_drafted_for_by_what_the_old_weights_said(
    tmp_path: Path, architecture: str
) -> None:
    """And what the new ones say is what a restart says; here on two ranks."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    write_tiny(tmp_path / "a", architecture, seed=1)
    new = write_tiny(tmp_path / "b", architecture, seed=2)
    settings = {**ENGINE, "tensor_parallel_size": 2}
    with Rollout(str(tmp_path / "b"), **settings) as restarted:
        wanted = restarted.generate(PROMPTS, SAMPLED)
    with Rollout(str(tmp_path / "a"), **settings, **DRAFTS) as engine:
        old = twice(engine, SAMPLED)
        engine.update_weights(new)
        before = engine.metrics().spec_draft_tokens_total
        found = engine.generate(PROMPTS, SAMPLED)
        assert engine.metrics().spec_draft_tokens_total > before
        assert answers(found) == answers(wanted) != answers(old)
        assert all(s.weight_versions[0].version == 1 for out in found for s in out.outputs)
        assert answers(twice(engine, SAMPLED)) == answers(wanted)


def test_settings_that_read_the_tokens_before_are_drafted_for_by_nobody(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    params = SamplingParams(max_tokens=30, temperature=0.0, repetition_penalty=1.2)
    with Rollout(str(tmp_path), **ENGINE, **DRAFTS) as engine:
        first = engine.generate(PROMPTS, params)
        assert answers(engine.generate(PROMPTS, params)) == answers(first)
        assert engine.metrics().spec_drafts_total == 0


class _Misled(NgramDrafter):
    """Every third of its tokens is another."""

    def draft(self, seq: Sequence, room: int) -> Draft:
        tokens = super().draft(seq, room).tokens
        return Draft(tuple((t + (seq.num_tokens + i) % 3 // 2) % 320 for i, t in enumerate(tokens)))


@pytest.mark.parametrize("budget", [24, 2048])
def test_states_go_back_behind_wrong_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, budget: int
) -> None:
    """Beside found prefixes and preemption, with hardly any slot for a snapshot."""
    write_tiny(tmp_path, "qwen3_next")
    settings = ENGINE | {
        "enable_prefix_caching": True, "state_snapshot_blocks": 2, "max_num_seqs": 4,
        "num_kv_blocks": 24, "max_num_batched_tokens": budget,
    }  # fmt: skip
    with Rollout(str(tmp_path), **settings) as plain:
        wanted = plain.generate(PROMPTS, SAMPLED)
    monkeypatch.setattr("rollout.engine.core.NgramDrafter", _Misled)
    with Rollout(str(tmp_path), **settings, **DRAFTS) as drafting:
        for _ in range(3):
            found = drafting.generate(PROMPTS, SAMPLED)
            assert answers(found) == answers(wanted)
            assert np.abs(logprobs(found) - logprobs(wanted)).max() < 5e-5
        metrics = drafting.metrics()
        assert metrics.preemptions_total
        assert 0 < metrics.spec_accepted_tokens_total < metrics.spec_draft_tokens_total
        assert metrics.state_snapshot_hits_total
        drafting._async.backend.core.scheduler.check_integrity()


def test_what_a_state_goes_back_behind_is_told_as_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To who hears of each token; an answer may end there, too."""
    write_tiny(tmp_path, "qwen3_next")
    monkeypatch.setattr("rollout.engine.core.NgramDrafter", _Misled)
    params = replace(SAMPLED, n=1)
    with Rollout(str(tmp_path), **ENGINE, **DRAFTS) as engine:
        engine.generate(PROMPTS[:1], params)
        before = engine.metrics()
        for out in engine.stream(PROMPTS[0], params):
            [one] = out.outputs
            assert one.kv_spans == (VersionSpan(0, 0, len(HEAD) + len(one.token_ids) - 1),)
        now = engine.metrics()
        taken = now.spec_accepted_tokens_total - before.spec_accepted_tokens_total
        assert taken < now.spec_draft_tokens_total - before.spec_draft_tokens_total


def test_vllms_and_sglangs_names_say_what_to_use(tmp_path: Path) -> None:
    write_tiny(tmp_path, "qwen3")
    for name in ("speculative_config", "speculative_algorithm", "speculative_num_draft_tokens"):
        with pytest.raises(ConfigError, match="num_speculative_tokens"):
            Rollout(str(tmp_path), **ENGINE, **{name: "NGRAM"})
