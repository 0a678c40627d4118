"""Drafts by a model that is updated with the policy: how many are right, and that none is seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drafted import ENGINE as _ENGINE
from drafted import answers, logprobs, rates
from tiny_models import write_tiny

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.engine.scheduling.block_manager import BlockManager
from rollout.engine.sequences.sequence import Sequence
from rollout.errors import ConfigError, WeightMismatch
from rollout.server.preflight import Preflight, check

pytestmark = pytest.mark.usefixtures("forked_ranks")

ENGINE = _ENGINE | {"enable_prefix_caching": False}
HEAD = [7, 3, 11, 200, 5, 9, 42, 17] * 3
PROMPTS = [HEAD, [*HEAD[:19], 3, 4], [90, 91] * 4]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=2, logprobs=2, ignore_eos=True)
SHAPED = SamplingParams(
    max_tokens=40, temperature=0.7, top_p=0.9, top_k=50, seed=4, min_tokens=9, ignore_eos=True,
    logit_bias={5: 2.0, 9: -3.0}, allowed_token_ids=list(range(3, 300, 2)),
)  # fmt: skip
DRAFTED = 31  # of 40 tokens, by drafts of 4: each step gives one more, as does the prompt's


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, and what drafts for it or cannot."""
    where = tmp_path_factory.mktemp("tiny")
    write_tiny(where / "own", "qwen3", seed=1)
    write_tiny(where / "new", "qwen3", seed=5)
    write_tiny(where / "other", "llama", seed=2, num_layers=1)
    write_tiny(where / "wide", "llama", seed=2, num_layers=1, vocab_size=352)
    write_tiny(where / "narrow", "llama", seed=2, num_layers=1, vocab_size=288)
    write_tiny(where / "short", "llama", seed=2, max_position_embeddings=48)
    write_tiny(where / "states", "qwen3_next")
    write_tiny(where / "windows", "gpt_oss")
    write_tiny(where / "sliding", "mistral", num_layers=3, sliding_window=16)
    write_tiny(where / "torn", "llama", num_layers=1)
    config = json.loads((where / "torn" / "config.json").read_text())
    (where / "torn" / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    return {path.name: path for path in where.iterdir()}


def drafted_by(draft: Path, most: int = 4, **settings: Any) -> dict[str, Any]:
    drafts = {"components": {"draft": str(draft)}, "draft_component": "draft"}
    return {**ENGINE, **drafts, "num_speculative_tokens": most, **settings}


class Wanted:
    """What an engine without drafts says, of each prompt and setting."""

    def __init__(self, model: Path) -> None:
        with Rollout(str(model), **ENGINE) as engine:
            self.of = {id(p): engine.generate(PROMPTS, p) for p in (GREEDY, SAMPLED, SHAPED)}


@pytest.fixture(scope="module")
def wanted(tiny: dict[str, Path]) -> Wanted:
    return Wanted(tiny["own"])


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.more)])
def itself(request: pytest.FixtureRequest, tiny: dict[str, Path]) -> Iterator[Rollout]:
    """A policy that the same weights draft for."""
    settings = {"tensor_parallel_size": request.param}
    with Rollout(str(tiny["own"]), **drafted_by(tiny["own"], **settings)) as engine:
        yield engine


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, SHAPED], ids=["greedy", "sampled", "shaped"])
def test_the_policy_as_its_own_draft_is_always_right(
    itself: Rollout, wanted: Wanted, params: SamplingParams
) -> None:
    """At any temperature and under any filter, as both draw by one seed and position."""
    before, steps = rates(itself), itself.metrics().steps_total
    found = itself.generate(PROMPTS, params)
    right, drafted = np.subtract(rates(itself), before)
    assert answers(found) == answers(wanted.of[id(params)])
    assert np.abs(logprobs(found) - logprobs(wanted.of[id(params)])).max() < 1e-5
    assert right == drafted == DRAFTED * len(answers(found))
    assert itself.metrics().steps_total - steps <= 10


def test_samples_of_different_settings_are_drafted_for_in_one_step(
    itself: Rollout, wanted: Wanted
) -> None:
    """Of which some change the logits and some do not, or only up to a draft's second token."""
    before, settings = rates(itself), [GREEDY, SHAPED, SAMPLED]
    found = itself.generate(PROMPTS, settings)
    assert answers(found) == [
        one for i, p in enumerate(settings) for one in answers(wanted.of[id(p)][i : i + 1])
    ]
    right, drafted = np.subtract(rates(itself), before)
    assert right == drafted == DRAFTED * 4
    first = SamplingParams(max_tokens=40, seed=1, min_tokens=9, stop_token_ids=[1])
    assert len(itself.generate(HEAD, first)[0].outputs[0].token_ids) >= 9


@pytest.mark.parametrize("draft", ["other", "wide", "narrow", "short"])
def test_another_draft_changes_no_token(tiny: dict[str, Path], wanted: Wanted, draft: str) -> None:
    """Of vocabularies that are padded otherwise, and one that ends before the sequences do."""
    with Rollout(str(tiny["own"]), **drafted_by(tiny[draft])) as engine:
        for params in (GREEDY, SAMPLED, SHAPED):
            found = engine.generate(PROMPTS, params)
            assert answers(found) == answers(wanted.of[id(params)])
        right, drafted = rates(engine)
        assert right < drafted / 2
        assert drafted > 50


def test_drafts_and_prompts_share_small_steps(tiny: dict[str, Path], wanted: Wanted) -> None:
    """The draft model reads a prompt over several steps, as the policy does."""
    settings = {"max_num_batched_tokens": 16}
    with Rollout(str(tiny["own"]), **drafted_by(tiny["own"], **settings)) as engine:
        for prompt in range(len(PROMPTS)):
            before = rates(engine)
            found = engine.generate(PROMPTS[prompt : prompt + 1], SAMPLED)
            assert answers(found) == answers(wanted.of[id(SAMPLED)][prompt : prompt + 1])
            right, drafted = np.subtract(rates(engine), before)
            assert right == drafted > 40


def test_preempted_samples_are_drafted_for_again(tiny: dict[str, Path], wanted: Wanted) -> None:
    settings = {"num_kv_blocks": 24, "enable_prefix_caching": True}
    with Rollout(str(tiny["own"]), **drafted_by(tiny["own"], **settings)) as engine:
        found = engine.generate(PROMPTS, SAMPLED)
        assert engine.metrics().preemptions_total > 0
        assert answers(found) == answers(wanted.of[id(SAMPLED)])
        right, drafted = rates(engine)
        assert right == drafted > 50


@pytest.mark.parametrize("name", ["own", "sliding"])
def test_a_prompt_is_read_once_for_all_that_share_its_blocks(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """By samples of one request, in the step in which all begin, and by those that find it again,
    a next turn among them; after an update it is read again.
    """
    read: list[int] = []
    note = BlockManager.note_drafted

    def noted(blocks: BlockManager, seq: Sequence, context: range) -> None:
        read.append(len(context))
        note(blocks, seq, context)

    monkeypatch.setattr(BlockManager, "note_drafted", noted)
    prompt = [(7 * i) % 300 for i in range(66)]
    four = SamplingParams(max_tokens=9, temperature=1.0, seed=1, n=4, ignore_eos=True)
    own = 4 * (9 + 8 + 2)  # what each gives, and the rest of the prompt behind whole blocks
    settings = {"enable_prefix_caching": True}
    with Rollout(str(tiny[name]), **drafted_by(tiny[name], **settings)) as engine:
        for turn, least in ((prompt, 64), (prompt, 0), ([*prompt, *HEAD], 16)):
            read.clear()
            [output] = engine.generate([turn], four)
            assert least < sum(read) <= least + own
            assert len(output.outputs) == 4
        engine.update_weights(str(tiny[name]))
        read.clear()
        engine.generate([prompt], four)
        assert 64 < sum(read) <= 64 + own
        right, drafted = rates(engine)
        assert right == drafted > 50


def test_an_update_of_both_leaves_drafts_right(tiny: dict[str, Path], wanted: Wanted) -> None:
    """As does a sleep; one of the policy alone leaves a draft model that says something else."""
    own, new = str(tiny["own"]), str(tiny["new"])
    with Rollout(new, **drafted_by(tiny["new"])) as engine:
        engine.generate(PROMPTS, SAMPLED)
        engine.update_weights({"policy": own, "draft": own})
        for _ in range(2):
            before = rates(engine)
            assert answers(engine.generate(PROMPTS, SAMPLED)) == answers(wanted.of[id(SAMPLED)])
            right, drafted = np.subtract(rates(engine), before)
            assert right == drafted > 50
            engine.sleep()
            engine.wake_up()
        engine.update_weights({"policy": new})
        before = rates(engine)
        assert answers(engine.generate(PROMPTS, SAMPLED)) != answers(wanted.of[id(SAMPLED)])
        right, drafted = np.subtract(rates(engine), before)
        assert right < drafted / 2


def test_a_saved_engine_starts_with_its_draft(tiny: dict[str, Path], tmp_path: Path) -> None:
    with Rollout(str(tiny["own"]), **drafted_by(tiny["other"])) as engine:
        found, before = engine.generate(PROMPTS, SAMPLED), rates(engine)
        engine.save_sharded_state(tmp_path)
    with Rollout(str(tmp_path), **drafted_by(tmp_path / "draft")) as engine:
        assert answers(engine.generate(PROMPTS, SAMPLED)) == answers(found)
        assert rates(engine) == before


def test_sequences_of_windows_are_drafted_for(tiny: dict[str, Path]) -> None:
    """Their tables of blocks are several, of which some forget; a draft model has one."""
    with Rollout(str(tiny["windows"]), **ENGINE) as plain:
        wanted = plain.generate(PROMPTS, SAMPLED)
    for draft in ("other", "windows"):
        with Rollout(str(tiny["windows"]), **drafted_by(tiny[draft])) as engine:
            assert answers(engine.generate(PROMPTS, SAMPLED)) == answers(wanted)
            right, drafted = rates(engine)
            assert drafted > 50
            assert (right == drafted) == (draft == "windows")


def test_what_windows_forget_is_kept_for_the_draft_model(tiny: dict[str, Path]) -> None:
    """It reads a sequence from its first token, also where it begins late."""
    lengths = [SamplingParams(max_tokens=n, seed=3, ignore_eos=True) for n in (90, 60, 55)]
    settings = {"speculative_max_num_seqs": 1}
    with Rollout(str(tiny["sliding"]), **drafted_by(tiny["sliding"], **settings)) as engine:
        engine.generate(PROMPTS, lengths)
        right, drafted = rates(engine)
        assert right == drafted > 20


def test_a_check_counts_both_models(tiny: dict[str, Path]) -> None:
    def checked(name: str, **more: Any) -> Preflight:
        settings = {**ENGINE, **more, "kv_cache_bytes": 1 << 20, "num_kv_blocks": None}
        return check(EngineConfig(model=str(tiny[name]), **settings))

    drafts = drafted_by(tiny["other"])
    own, other, both = checked("own"), checked("other"), checked("own", **drafts)
    assert both.memory.weights == own.memory.weights + other.memory.weights
    assert both.kv_bytes_per_token == own.kv_bytes_per_token + other.kv_bytes_per_token
    assert both.size.num_blocks < own.size.num_blocks
    assert any("draft: LlamaForCausalLM" in line for line in both.lines())
    with pytest.raises(ConfigError, match="it has recurrent states"):
        checked("own", **drafted_by(tiny["states"]))
    with pytest.raises(WeightMismatch, match="missing"):
        checked("own", components={"draft": str(tiny["torn"])})


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"draft_component": "drafts"}, "draft_component='drafts' is none of components .draft."),
        ({"num_speculative_tokens": 0}, "drafts num_speculative_tokens, of 1 or more"),
        ({"speculative_history_tokens": 9}, "leave speculative_history_tokens out"),
        ({"components": {"draft": "states"}}, "it has recurrent states"),
    ],
)
def test_what_cannot_draft_is_refused(
    tiny: dict[str, Path], settings: dict[str, Any], told: str
) -> None:
    named = {
        name: {key: str(tiny[value]) for key, value in values.items()}
        if isinstance(values, dict)
        else values
        for name, values in settings.items()
    }
    with pytest.raises(ConfigError, match=told):
        Rollout(str(tiny["own"]), **{**drafted_by(tiny["other"]), **named})


def test_a_tokenizer_of_other_tokens_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path / "own", "qwen3", tokenizer=True)
    write_tiny(tmp_path / "draft", "llama", seed=2, num_layers=1, tokenizer=True)
    settings = drafted_by(tmp_path / "draft", skip_tokenizer_init=False)
    with Rollout(str(tmp_path / "own"), **settings) as engine:
        engine.generate("one two", GREEDY)
        assert rates(engine)[1] > 0
    file = tmp_path / "draft" / "tokenizer.json"
    told = json.loads(file.read_text())
    vocabulary = told["model"]["vocab"]
    names = sorted(vocabulary, key=vocabulary.get)
    told["model"]["vocab"] = dict(zip(names, reversed(range(len(names))), strict=True))
    file.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="its tokenizer has other tokens than the model's"):
        Rollout(str(tmp_path / "own"), **settings)
