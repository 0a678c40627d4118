"""Drafts by an EAGLE-3 head: what it reads, how many are right, and that none is seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from drafted import ENGINE, answers, check_all_right, logprobs, rates
from head_passes import Watched
from safetensors.torch import load_file, save_file
from tiny_eagles import FORESEES, SPECULATORS, foresee, save_head, write_eagle, write_simple
from tiny_models import write_tiny
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.errors import ConfigError, WeightMismatch
from rollout.server.preflight import Preflight, check

pytestmark = pytest.mark.usefixtures("forked_ranks")

PROMPTS = [[7, 3, 11, 200, 5, 9, 42, 17] * 3, [7, 3, 11, 200, 5, 9, 42, 17, 3, 4], [90, 91] * 4]
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=2, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
SOME = [*range(0, 60, 3), *range(61, 320, 2)]  # of the policy's 320 tokens
READS = [1, 2, 3]


def drafted_by(head: Path, **settings: Any) -> dict[str, Any]:
    drafts = {"components": {"draft": str(head)}, "draft_component": "draft"}
    return {**ENGINE, **drafts, "num_speculative_tokens": 3, **settings}


def model(path: Path) -> Path:
    return path / "model.safetensors"


def check_only(path: str, **settings: Any) -> Preflight:
    return check(EngineConfig(model=path, **settings))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("tiny")
    for name, seed in (("simple", 0), ("other", 5)):
        policy = write_simple(where / name, seed)
        for of, targets in (("all", None), ("some", SOME)):
            path = where / f"{name}_{of}"
            foresee(head := write_eagle(path, policy, READS, targets, settings=FORESEES))
            save_head(path, head)
    write_tiny(where / "llama", "llama", num_layers=4)
    write_eagle(where / "random", policy, READS, SOME)
    write_eagle(where / "whole", policy, READS, settings={"hidden_size": 48}, embeds=True)
    return {path.name: path for path in where.iterdir()}


@pytest.mark.parametrize("arch", ["llama", "gpt_oss"])
def test_it_reads_the_policys_states_and_the_tokens_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """In the first pass of a step; in later ones what it has made itself. Also behind what a wrong
    draft has left, and where a prefix was found.
    """
    policy = write_tiny(tmp_path / "policy", arch, num_layers=4)
    oracle = write_eagle(tmp_path / "head", policy, READS, SOME)
    seen = Watched.by(monkeypatch)
    settings = drafted_by(tmp_path / "head", max_num_batched_tokens=24)
    with Rollout(str(tmp_path / "policy"), **settings) as engine:
        for _ in range(2):
            [out] = engine.generate([PROMPTS[0]], GREEDY)
            ids = torch.tensor([*PROMPTS[0], *out.outputs[0].token_ids])
            first = oracle.first(oracle.policy_states(ids))
            wanted, _ = oracle(ids[1:], first[:-1])
            seen.check(ids, first, wanted, out.num_cached_tokens, 1e-3)
        assert out.num_cached_tokens


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_head_that_foresees_the_policy_is_always_right(tiny: dict[str, Path], ranks: int) -> None:
    """At any temperature; once another one's are loaded with another policy, and after a sleep."""
    params = [SAMPLED, GREEDY]
    with Rollout(str(tiny["simple"]), **ENGINE) as plain:
        wanted = [plain.generate(PROMPTS, each) for each in params]
    settings = drafted_by(tiny["simple_all"], tensor_parallel_size=ranks)
    with Rollout(str(tiny["other"]), **settings) as engine:
        engine.generate(PROMPTS, SAMPLED)
        assert rates(engine)[0] < rates(engine)[1] / 4
        other = {"policy": str(tiny["other"]), "draft": str(tiny["other_all"])}
        engine.update_weights(other)
        head = load_file(model(tiny["simple_all"]))
        receipt = engine.update_weights({"policy": str(tiny["simple"]), "draft": head})
        assert receipt.components["draft"].num_tensors == len(head)
        for asleep in (False, True):
            if asleep:
                engine.sleep(level=1)
                engine.wake_up()
            check_all_right(engine, PROMPTS, params, wanted)
        engine.update_weights(str(tiny["other"]))
        before = rates(engine)
        engine.generate(PROMPTS, SAMPLED)
        accepted, drafted = np.subtract(rates(engine), before)
        assert accepted < drafted / 4


def test_a_head_of_some_tokens_is_right_where_those_are_drawn(tiny: dict[str, Path]) -> None:
    """An update may bring the maps between the vocabularies, from a directory or in a dict."""
    with Rollout(str(tiny["simple"]), **ENGINE) as plain:
        wanted = [plain.generate(PROMPTS, each) for each in (SAMPLED, GREEDY)]
    own = tiny["simple_some"]
    with Rollout(str(tiny["simple"]), **drafted_by(own)) as engine:
        for source in (str(own), load_file(model(own))):
            engine.update_weights({"draft": source})
        for each, known in zip((SAMPLED, GREEDY), wanted, strict=True):
            before = rates(engine)
            assert answers(engine.generate(PROMPTS, each)) == answers(known)
            accepted, drafted = np.subtract(rates(engine), before)
            assert 0 < accepted <= drafted
        outside = SamplingParams(
            max_tokens=40, temperature=0.5, seed=1, allowed_token_ids=[1, 2, 4], ignore_eos=True
        )
        found = engine.generate(PROMPTS, outside)
        assert all({*tokens} <= {1, 2, 4} for tokens, _ in answers(found))


@pytest.mark.parametrize(
    ("arch", "head", "settings"),
    [
        ("llama", {"targets": SOME}, {}),
        ("qwen3_moe", {"layer": SPECULATORS, "norms": ["norm_output"]}, {"kv_cache_dtype": "int8"}),
        ("qwen3_next", {"targets": SOME}, {}),
        ("qwen3", {"heads": False}, {"quantization": "int8", "dtype": "bfloat16"}),
        ("qwen3", {"embeds": True}, {"max_adapters": 1, "lora_embeddings": True}),
        pytest.param(
            "gpt_oss", {"targets": SOME}, {"tensor_parallel_size": 2}, marks=pytest.mark.more
        ),
        pytest.param("deepseek_v3", {}, {}, marks=pytest.mark.more),
        pytest.param("llama4", {}, {"num_kv_blocks": 32}, marks=pytest.mark.more),
    ],
)
def test_no_head_changes_a_token(
    tmp_path: Path, arch: str, head: dict[str, Any], settings: dict[str, Any]
) -> None:
    """One of random weights is mostly wrong; among few blocks, with preemption, in small steps."""
    policy = write_tiny(
        tmp_path / "policy", arch, **({} if arch == "qwen3_next" else {"num_layers": 4})
    )
    write_eagle(tmp_path / "head", policy, READS, **head)
    few = {
        "num_kv_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 4,
        "state_snapshot_blocks": 2, **settings,
    }  # fmt: skip
    with Rollout(str(tmp_path / "policy"), **{**ENGINE, **few}) as plain:
        wanted = plain.generate(PROMPTS, SAMPLED)
    with Rollout(str(tmp_path / "policy"), **drafted_by(tmp_path / "head", **few)) as engine:
        for _ in range(2):
            assert answers(engine.generate(PROMPTS, SAMPLED)) == answers(wanted)
        accepted, drafted = rates(engine)
        assert accepted < drafted > 50
        assert engine.metrics().preemptions_total
        engine._async.backend.core.scheduler.check_integrity()


def test_bits_are_those_that_come_without_where_they_depend_on_no_batch(
    tiny: dict[str, Path],
) -> None:
    settings = {"deterministic": True, "dtype": "bfloat16"}
    with Rollout(str(tiny["llama"]), **ENGINE, **settings) as plain:
        wanted = plain.generate(PROMPTS, SAMPLED)
    with Rollout(str(tiny["llama"]), **drafted_by(tiny["random"], **settings)) as engine:
        found = engine.generate(PROMPTS, SAMPLED)
        assert rates(engine)[1] > 50
    assert answers(found) == answers(wanted)
    assert np.array_equal(logprobs(found), logprobs(wanted))


@pytest.mark.parametrize("head", ["random", "whole"])
def test_a_check_counts_the_head_and_what_it_reads(tiny: dict[str, Path], head: str) -> None:
    def checked(settings: dict[str, Any]) -> Preflight:
        sized = {**settings, "kv_cache_bytes": 1 << 20, "num_kv_blocks": None}
        return check(EngineConfig(model=str(tiny["llama"]), **sized))

    own, both = checked(ENGINE), checked(drafted_by(tiny[head]))
    with Rollout(str(tiny["llama"]), **drafted_by(tiny[head])) as engine:
        plan = engine._async.backend.core.memory
    assert both.memory.weights == plan.weights > own.memory.weights
    layer, hidden = 2 * 2 * 24 * 4, 3 * 64 * 4
    assert both.kv_bytes_per_token == own.kv_bytes_per_token + layer + hidden
    assert any("draft: EAGLE-3 head" in line for line in both.lines())


@pytest.mark.parametrize("drafts", [True, False])
def test_a_saved_engine_starts_with_its_head(
    tiny: dict[str, Path], tmp_path: Path, drafts: bool
) -> None:
    """Also one that only held it: the map between the vocabularies is saved, too."""
    settings = drafted_by(tiny["simple_some"], tensor_parallel_size=2)
    if not drafts:
        settings = ENGINE | {"components": settings["components"], "tensor_parallel_size": 2}
    with Rollout(str(tiny["simple"]), **settings) as engine:
        wanted = answers(engine.generate(PROMPTS, GREEDY))
        engine.save_sharded_state(str(tmp_path))
    with Rollout(str(tmp_path), **drafted_by(tmp_path / "draft")) as engine:
        assert answers(engine.generate(PROMPTS, GREEDY)) == wanted
        assert rates(engine)[0] > 0


def test_a_head_of_another_policy_is_refused(tiny: dict[str, Path], tmp_path: Path) -> None:
    write_tiny(tmp_path / "narrow", "llama", num_layers=4, hidden_size=32)
    write_tiny(tmp_path / "flat", "llama", num_layers=2)
    sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)).save_pretrained(tmp_path / "foreign")
    for name, told in (
        ("narrow", "joins states of 192 elements in all, and the model's are 96"),
        ("flat", "reads what comes before layers 1, 2, 3, and the model has 2"),
        ("foreign", "GPTNeoXForCausalLM does not give here"),
    ):
        settings = drafted_by(tiny["whole"])
        for start in (check_only, Rollout):
            with pytest.raises(ConfigError, match=f"the EAGLE head in .*whole .*{told}"):
                start(str(tmp_path / name), **settings)


def test_a_check_says_what_of_a_heads_files_does_not_fit(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    tensors = load_file(model(tiny["random"]))
    tensors["midlayer.mlp.up_proj.weight"] = torch.ones(95, 64)
    (tmp_path / "config.json").write_text((tiny["random"] / "config.json").read_text())
    save_file(tensors, model(tmp_path), {"format": "pt"})
    told = r"do not fit: midlayer.mlp.up_proj.weight is \[95, 64\], not \[96, 64\]"
    with pytest.raises(WeightMismatch, match=told):
        check_only(str(tiny["llama"]), **drafted_by(tmp_path))
