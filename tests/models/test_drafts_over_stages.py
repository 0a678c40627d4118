"""Draft models and prediction heads before a policy in stages: the first stage drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from drafted import ENGINE, answers, logprobs, rates
from tiny_eagles import write_eagle
from tiny_heads import foresee, write_release
from tiny_models import write_tiny

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.errors import ConfigError
from rollout.server.preflight import check

pytestmark = pytest.mark.usefixtures("forked_ranks")
PARAMS = (
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=1.0, seed=3, n=2, ignore_eos=True),
)
DRAFTS = {"num_speculative_tokens": 3}


def prompts() -> list[list[int]]:
    """In one step more tokens than one part has."""
    draw = random.Random(2)
    return [[draw.randrange(300) for _ in range(length)] for length in (70, 5, 60, 9, 33)]


def course(first: Path, then: Path, draft: str, **settings: Any) -> list[Any]:
    """What an engine says and drafts before and after an update of all that it holds."""
    settings = {**ENGINE, **DRAFTS, "draft_component": draft, **settings}
    found: list[Any] = []
    with Rollout(str(first), **settings) as engine:
        for _ in range(2):
            for params in PARAMS:
                outputs = engine.generate(prompts(), params)
                found.append((answers(outputs), logprobs(outputs).tolist(), rates(engine)))
            sources = {
                "policy": str(then),
                draft: str(then / "draft" if draft == "draft" else then),
            }
            receipt = engine.update_weights(sources)
            found.append((receipt.num_tensors, receipt.digest))
            assert engine.check_weights(sources).equal
    return found


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("glm4_moe", {"max_num_batched_tokens": 64}),
        pytest.param("qwen3_5", {"max_num_batched_tokens": 64}, marks=pytest.mark.more),
        pytest.param(
            "glm4_moe",
            {"tensor_parallel_size": 2, "max_num_batched_tokens": 64},
            marks=pytest.mark.more,
        ),
        pytest.param("deepseek_v3", {"max_num_batched_tokens": 64}, marks=pytest.mark.more),
    ],
)
def test_a_prediction_head_drafts_what_it_drafts_before_one_stage(
    tmp_path: Path, arch: str, settings: dict[str, Any]
) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    for seed, path in enumerate(paths):
        write_release(path, arch, seed=seed)
    one = course(*paths, "mtp", **settings)
    assert one == course(*paths, "mtp", pipeline_parallel_size=2, **settings)
    assert one[1][2][1] > 40
    settings = {**ENGINE, **DRAFTS, **settings, "draft_component": "mtp"}
    told = check(EngineConfig(model=str(paths[0]), pipeline_parallel_size=2, **settings))
    assert len(told.rank_bytes) == 2 * settings.get("tensor_parallel_size", 1)


def test_a_head_reads_the_states_of_all_parts_of_a_step(tmp_path: Path) -> None:
    """Which differ in the last bits by how prompts are cut."""
    paths = tmp_path / "a", tmp_path / "b"
    for seed, path in enumerate(paths):
        write_release(path, "glm4_moe", seed=seed)
    one, two = course(*paths, "mtp"), course(*paths, "mtp", pipeline_parallel_size=2)
    for (tokens, found, _), (told, wanted, _) in zip(two[:2], one[:2], strict=True):
        assert tokens == told
        assert found == pytest.approx(wanted, abs=1e-5)
    foresee(paths[0])
    settings = {**ENGINE, **DRAFTS, "draft_component": "mtp", "pipeline_parallel_size": 2}
    with Rollout(str(paths[0]), **settings) as engine:
        engine.generate(prompts(), PARAMS[0])
        accepted, drafted = rates(engine)
        assert accepted == drafted > 40


def test_a_draft_model_lies_on_the_first_stage(tmp_path: Path) -> None:
    paths = tmp_path / "a", tmp_path / "b"
    for seed, path in enumerate(paths):
        write_tiny(path, "qwen3", seed=seed, num_layers=3)
        write_tiny(path / "draft", "llama", seed=seed + 2)
    held = {"components": {"draft": str(paths[0] / "draft")}}
    one = course(*paths, "draft", **held)
    assert one == course(*paths, "draft", pipeline_parallel_size=3, **held)
    settings = {**ENGINE, **held, "pipeline_parallel_size": 3}
    with Rollout(str(paths[0]), **settings) as engine:  # held alone
        ranks = engine._async.backend.core.rank_info
        of_draft = sum(
            m.nbytes for m in engine.weight_info().tensors if m.name.startswith("draft:")
        )
        assert ranks[0]["weight_bytes"] > of_draft > max(r["weight_bytes"] for r in ranks[1:]) / 2


def test_a_head_that_reads_what_several_stages_read_is_refused(tmp_path: Path) -> None:
    policy = write_tiny(tmp_path / "policy", "llama", num_layers=4)
    write_eagle(tmp_path / "head", policy, (1, 2, 3))
    settings = {**ENGINE, **DRAFTS, "components": {"e": str(tmp_path / "head")}}
    config = EngineConfig(
        model=str(tmp_path / "policy"), draft_component="e", pipeline_parallel_size=2, **settings
    )
    words = "an EAGLE-3 head reads what comes before layers 1, 2, 3, which pipeline_parallel_size=2"
    with pytest.raises(ConfigError, match=words):
        check(config)
    with pytest.raises(ConfigError, match=words):
        Rollout(**config.to_dict())
