"""Captured steps with prompts, on a card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from card_engines import GREEDY, PROMPTS, SPECIAL, card_engine, greedy_tokens
from tiny_eagles import FORESEES, save_head, write_eagle, write_simple
from tiny_eagles import foresee as foresee_eagle
from tiny_heads import foresee, write_release
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.engine.worker.graphs.prefill_graphs import PrefillGraphs
from rollout.models.causal_lm import CausalLM
from rollout.models.prediction.head import HeadBehind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
CAPTURED = {"cuda_graph_prefill": 16, "max_num_batched_tokens": 16, "max_num_seqs": 2}
LONG = [[(7 * i) % 90 for i in range(37)]]


def _with_prompts(engine: Rollout) -> list[Any]:
    """Prompts beside decodes, in chunks, behind a prefix that is found, and scored."""
    apart = [replace(GREEDY, max_tokens=count) for count in (2, 4, 2)]  # the third comes between
    calls = (PROMPTS, apart), (LONG, GREEDY), (LONG, GREEDY), (PROMPTS, SPECIAL)
    return [out for prompts, params in calls for out in engine.generate(prompts, params)]


def _logprobs(output: Any) -> list[Any]:
    """Of the tokens, and of the prompt's where it is scored."""
    scored = (output.prompt_logprobs or [None])[1:]
    return [list(output.outputs[0].logprobs.raw), *scored]


def _assert_alike(ours: list[Any], theirs: list[Any], within: float) -> None:
    for a, b in zip(ours, theirs, strict=True):
        x, y = a.outputs[0], b.outputs[0]
        assert x.token_ids == y.token_ids
        assert a.num_cached_tokens == b.num_cached_tokens
        for one, other in zip(_logprobs(a), _logprobs(b), strict=True):
            assert one == pytest.approx(other, rel=within, abs=within)


@pytest.mark.parametrize(
    ("dtype", "within", "updates"), [("float32", 1e-4, 1), ("bfloat16", 2e-2, 0)]
)
def test_captured_prompts_give_what_plain_ones_give(
    tiny_qwen3: Path,
    trained: Any,
    monkeypatch: pytest.MonkeyPatch,
    dtype: str,
    within: float,
    updates: int,
) -> None:
    """Before an update, and with the other set of graphs after it."""
    replayed, run = [], PrefillGraphs.run

    def noted(graphs: PrefillGraphs, batch: Any) -> Any:
        found = run(graphs, batch)
        replayed.append((id(graphs), found is not None, len(batch.input_ids)))
        return found

    monkeypatch.setattr(PrefillGraphs, "run", noted)
    settings = {**CAPTURED, "dtype": dtype}
    with card_engine(tiny_qwen3, **settings, cuda_graphs="off") as plain:
        wanted = [_with_prompts(plain)]
        for _ in range(updates):
            plain.update_weights(trained)
            wanted.append(_with_prompts(plain))
        assert not replayed
    used: list[int] = []
    with card_engine(tiny_qwen3, **settings) as engine:
        for turn in wanted:
            if used:
                engine.update_weights(trained)
            _assert_alike(_with_prompts(engine), turn, within)
            assert all(found for _, found, _ in replayed)
            assert {16, 37 - 32} <= {tokens for *_, tokens in replayed}  # chunks, a last one
            used += {graphs for graphs, *_ in replayed}
            replayed.clear()
    assert len(set(used)) == len(used) == 1 + updates  # one set at a time, and not the same


def test_drafts_change_no_token(tiny_qwen3: Path) -> None:
    """The second answers are drafted from the first, in graphs of several tokens a sequence."""
    drafts = {"num_speculative_tokens": 2, "speculative_history_tokens": 1000}
    with card_engine(tiny_qwen3, **CAPTURED, **drafts) as engine:
        first = engine.generate(PROMPTS[:2], GREEDY)
        _assert_alike(engine.generate(PROMPTS[:2], GREEDY), first, 1e-4)
        assert engine.metrics().spec_accepted_tokens_total >= len(first)


def test_a_draft_model_changes_no_token(tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy's own weights: all that they draft is right, at any temperature, also after an
    update of both, and each forward pass is a graph's.
    """
    drafts = {"components": {"draft": str(tiny_qwen3)}, "draft_component": "draft"}
    sampled = SamplingParams(max_tokens=8, temperature=1.0, seed=5, ignore_eos=True)
    with card_engine(tiny_qwen3, **CAPTURED) as engine:
        wanted = engine.generate(PROMPTS[:2], sampled)
    forward, passes = CausalLM.forward, list[int]()
    with card_engine(tiny_qwen3, **CAPTURED, **drafts, num_speculative_tokens=2) as engine:
        monkeypatch.setattr(CausalLM, "forward", lambda *args: passes.append(1) or forward(*args))
        for updates in range(2):
            _assert_alike(engine.generate(PROMPTS[:2], sampled), wanted, 1e-4)
            figures = engine.metrics()
            assert figures.spec_accepted_tokens_total == figures.spec_draft_tokens_total
            assert figures.spec_draft_tokens_total == 8 * (1 + updates)
            both = {"policy": str(tiny_qwen3), "draft": str(tiny_qwen3)}
            engine.update_weights(both)
    assert not passes


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of each forward pass, of a head or a model, that is no graph's."""
    found = list[int]()
    for kind in (CausalLM, HeadBehind):

        def noted(model: Any, batch: Any, kv: Any, run: Any = kind.hidden_states) -> Any:
            found.append(len(batch.input_ids))
            return run(model, batch, kv)

        monkeypatch.setattr(kind, "hidden_states", noted)
    return found


@pytest.mark.parametrize("arch", ["glm4_moe", "qwen3_5"])
def test_a_head_that_foresees_the_policy_is_always_right(
    tmp_path: Path, passes: list[int], arch: str
) -> None:
    """Captured, as the steps are that keep what it reads, which may have states."""
    sizes: dict[str, Any] = {"vocab_size": 96, "intermediate_size": 64, "rms_norm_eps": 1e-9}
    if arch == "glm4_moe":
        sizes |= {"num_layers": 1, "first_k_dense_replace": 1}
    write_release(tmp_path, arch, **sizes)
    foresee(tmp_path)
    with card_engine(tmp_path, **CAPTURED) as engine:
        wanted = engine.generate(PROMPTS[:2], GREEDY)
    drafts = {"draft_component": "mtp", "num_speculative_tokens": 2}
    with card_engine(tmp_path, **CAPTURED, **drafts) as engine:
        passes.clear()
        for updates in range(2):
            _assert_alike(engine.generate(PROMPTS[:2], GREEDY), wanted, 1e-4)
            figures = engine.metrics()
            assert figures.spec_accepted_tokens_total == figures.spec_draft_tokens_total
            assert figures.spec_draft_tokens_total > updates
            engine.update_weights({"policy": str(tmp_path), "mtp": str(tmp_path)})
    assert not passes


def test_so_is_an_eagle_head(tmp_path: Path, passes: list[int]) -> None:
    """Captured steps keep what it reads, too, which that one makes no use of."""
    path = tmp_path / "head"
    sizes = {"vocab_size": 96, "intermediate_size": 64}
    policy = write_simple(tmp_path / "policy", num_layers=1, **sizes)
    foresee_eagle(head := write_eagle(path, policy, [0, 1, 1], [*range(96)], settings=FORESEES))
    save_head(path, head)
    with card_engine(tmp_path / "policy", **CAPTURED) as engine:
        wanted = engine.generate(PROMPTS[:2], GREEDY)
    drafts = {"components": {"draft": str(path)}, "draft_component": "draft"}
    with card_engine(tmp_path / "policy", **CAPTURED, **drafts, num_speculative_tokens=2) as engine:
        passes.clear()
        for updates in range(2):
            _assert_alike(engine.generate(PROMPTS[:2], GREEDY), wanted, 1e-4)
            figures = engine.metrics()
            assert figures.spec_accepted_tokens_total == figures.spec_draft_tokens_total
            assert figures.spec_draft_tokens_total > updates
            engine.update_weights({"policy": str(tmp_path / "policy"), "draft": str(path)})
    assert not passes


HYBRID = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
STATES: dict[str, dict[str, Any]] = {
    "qwen3_next": {**HYBRID, "mlp_only_layers": [0, 1]},
    "nemotron_h": {"layers_block_type": ["linear_attention", "full_attention"]},
}


@pytest.mark.parametrize("arch", STATES)
def test_states_go_on_in_captured_steps(tmp_path: Path, passes: list[int], arch: str) -> None:
    """As on a CPU: beside padding, which has none, behind a prefix that is found, and after an
    update.
    """
    write_tiny(tmp_path, arch, vocab_size=96, **STATES[arch])
    with card_engine(tmp_path, **CAPTURED, device="cpu") as host:
        wanted = _with_prompts(host)
    staging = "auto" if arch == "qwen3_next" else "none"
    with card_engine(tmp_path, **CAPTURED, staging=staging) as engine:
        passes.clear()
        _assert_alike(_with_prompts(engine), wanted, 1e-3)
        if staging == "auto":
            engine.update_weights(str(tmp_path))
            _assert_alike(engine.generate(LONG, GREEDY), wanted[3:4], 1e-3)
    assert not passes


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`", "ignore:`lora_bias=True`")
def test_adapters_are_at_work_in_captured_steps(tiny_qwen3: Path, passes: list[int]) -> None:
    """Two in one batch, beside the base, also once one has been replaced; one with biases is not,
    beside which the others are.
    """
    pytest.importorskip("peft")
    from adapted_models import adapted

    models = {name: adapted(tiny_qwen3, seed) for seed, name in enumerate(("one", "two"))}
    biased = adapted(tiny_qwen3, 7, lora_bias=True)
    params = [replace(GREEDY, adapter=name) for name in ("one", "two", "one", None)]
    prompts = [*PROMPTS, LONG[0]]
    slots = {**CAPTURED, "max_num_seqs": 4, "max_adapters": 4, "max_lora_rank": 4}
    found = []
    for graphs in ("off", "auto"):
        turns: list[Any] = []
        with card_engine(tiny_qwen3, **slots, cuda_graphs=graphs) as engine:
            engine.update_weights(adapters=models)
            passes.clear()
            turns.append(engine.generate(prompts, params))
            engine.update_weights(adapters={"one": models["two"], "biased": biased})
            turns.append(engine.generate(prompts, params))
            captured = not passes
            turns.append(engine.generate(PROMPTS[:1], replace(GREEDY, adapter="biased")))
            assert passes
        found.append(turns)
        assert captured == (graphs == "auto")
    for ours, theirs in zip(found[1], found[0], strict=True):
        _assert_alike(ours, theirs, 1e-4)
    said = [output.outputs[0].token_ids for output in found[0][0]]
    assert said[0] != said[2] or said[1] != said[2]


def test_where_prompts_cannot_be_captured_decodes_are(
    tiny_qwen3: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def waits(model: Any, batch: Any, kv: Any) -> Any:
        states = hidden_states(model, batch, kv)
        if len(batch.input_ids) > len(batch.context_lens):
            states.sum().item()
        return states

    hidden_states = CausalLM.hidden_states
    monkeypatch.setattr(CausalLM, "hidden_states", waits)
    with card_engine(tiny_qwen3, **CAPTURED) as engine:
        found = greedy_tokens(engine)
    monkeypatch.undo()
    with card_engine(tiny_qwen3, cuda_graphs="off") as plain:
        assert greedy_tokens(plain) == found
    told = [
        line for line in caplog.records if "steps with prompts are not captured" in line.message
    ]
    assert len(told) == 1  # for both sets
