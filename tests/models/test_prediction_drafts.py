"""Drafts by the prediction head of a release: what it reads, how many are right, and that none is
seen."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import ENGINE, answers, check_all_right, rates
from head_passes import Watched
from safetensors.torch import load_file, save_file
from tiny_heads import foresee, write_release
from tiny_models import write_tiny
from torch import Tensor

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.engine.scheduling.block_manager import BlockManager
from rollout.errors import ConfigError, WeightMismatch
from rollout.models.prediction.head import PredictionHead
from rollout.server.preflight import Preflight, check

pytestmark = pytest.mark.usefixtures("forked_ranks")

DRAFTS = {"draft_component": "mtp", "num_speculative_tokens": 3}
PROMPTS = [[7, 3, 11, 200, 5, 9, 42, 17] * 3, [7, 3, 11, 200, 5, 9, 42, 17, 3, 4], [90, 91] * 4]
SAMPLED = SamplingParams(max_tokens=40, temperature=1.0, seed=3, n=2, ignore_eos=True)
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("tiny")
    for arch in ("glm4_moe", "qwen3_next"):
        copies = arch == "glm4_moe"
        write_release(where / arch, arch, copies=copies, seed=2, rms_norm_eps=1e-9)
        # Two norms are one where nothing is added to what they divide by.
        write_release(where / f"right_{arch}", arch, copies=copies, rms_norm_eps=1e-9)
        foresee(where / f"right_{arch}")
    write_tiny(where / "llama", "llama")
    write_tiny(where / "headless", "glm4_moe")
    return {path.name: path for path in where.iterdir()}


@pytest.mark.parametrize("arch", ["deepseek_v3", "qwen3_5"])
def test_it_reads_the_policys_states_and_the_tokens_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """In the first pass of a step; in later ones what it has made itself. Also behind what a wrong
    draft has left, and where a prefix was found.
    """
    oracle = write_release(tmp_path, arch)
    seen = Watched.by(monkeypatch)
    with Rollout(str(tmp_path), **ENGINE, **DRAFTS, max_num_batched_tokens=24) as engine:
        for _ in range(2):
            [out] = engine.generate([PROMPTS[0]], GREEDY)
            ids = torch.tensor([*PROMPTS[0], *out.outputs[0].token_ids])
            states = oracle.policy_states(ids)
            wanted, _ = oracle(ids[1:], states[:-1])
            seen.check(ids, states, wanted, out.num_cached_tokens, 1e-4)
        assert out.num_cached_tokens


@pytest.mark.parametrize("arch", ["glm4_moe", "qwen3_next"])
def test_it_reads_no_state_that_the_policy_has_not_made(
    tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch, arch: str
) -> None:
    """Of short sequences that are preempted, and computed again, too: blocks come with NaN."""
    run, allocate = PredictionHead.hidden_states, BlockManager._allocate

    def watched(self: PredictionHead, policy: Any, batch: Any, kv: Any, before: Tensor) -> Tensor:
        assert not before.isnan().any()
        return run(self, policy, batch, kv, before)

    few = ENGINE | DRAFTS | {"num_kv_blocks": 9, "max_model_len": 64}
    with Rollout(str(tiny[arch]), **few) as engine:
        hidden = engine._async.backend.core._executor._worker._runner.kv.hidden.pages

        def allocated(self: BlockManager) -> int:
            block = allocate(self)
            hidden[block * 8 : block * 8 + 8] = float("nan")
            return block

        monkeypatch.setattr(PredictionHead, "hidden_states", watched)
        monkeypatch.setattr(BlockManager, "_allocate", allocated)
        params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
        engine.generate([[1, 2, 3], [4, 5, 6]], params)
        assert engine.metrics().preemptions_total
        assert rates(engine)[1]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more)])
@pytest.mark.parametrize("arch", ["glm4_moe", "qwen3_next"])
def test_a_head_that_foresees_the_policy_is_always_right(
    tiny: dict[str, Path], arch: str, ranks: int
) -> None:
    """Of a release, at any temperature; once another one's are loaded, and after a sleep."""
    right, other = tiny[f"right_{arch}"], tiny[arch]
    params = [SAMPLED, GREEDY]
    with Rollout(str(right), **ENGINE) as plain:
        wanted = [plain.generate(PROMPTS, each) for each in params]
    settings = ENGINE | DRAFTS | {"tensor_parallel_size": ranks}
    with Rollout(str(other), **settings) as engine:
        engine.generate(PROMPTS, SAMPLED)
        assert rates(engine)[0] < rates(engine)[1] / 4
        receipt = engine.update_weights({"policy": str(right), "mtp": str(right)})
        assert receipt.components["mtp"].num_tensors > 10
        for asleep in (False, True):
            if asleep:
                engine.sleep(level=1)
                engine.wake_up()
            check_all_right(engine, PROMPTS, params, wanted)


@pytest.mark.parametrize(
    ("arch", "settings"),
    [
        ("deepseek_v3", {}),
        ("glm4_moe", {"kv_cache_dtype": "int8"}),
        ("qwen3_next", {}),
        pytest.param("qwen3_5", {"tensor_parallel_size": 2}, marks=pytest.mark.more),
        pytest.param("qwen3_5_moe", {}, marks=pytest.mark.more),
        pytest.param("glm4_moe_lite", {"quantization": "int8"}, marks=pytest.mark.more),
    ],
)
def test_no_head_changes_a_token(tmp_path: Path, arch: str, settings: dict[str, Any]) -> None:
    """One of random weights is mostly wrong; among few blocks, with preemption, in small steps."""
    write_release(tmp_path, arch, copies=arch == "glm4_moe")
    few = ENGINE | settings | {
        "num_kv_blocks": 24, "max_num_batched_tokens": 16, "max_num_seqs": 4,
        "state_snapshot_blocks": 2,
    }  # fmt: skip
    with Rollout(str(tmp_path), **few) as plain:
        wanted = plain.generate(PROMPTS, SAMPLED)
    with Rollout(str(tmp_path), **few, **DRAFTS) as engine:
        for _ in range(2):
            assert answers(engine.generate(PROMPTS, SAMPLED)) == answers(wanted)
        accepted, drafted = rates(engine)
        assert accepted < drafted > 50
        assert engine.metrics().preemptions_total
        engine._async.backend.core.scheduler.check_integrity()


def test_bits_are_those_that_come_without_where_they_depend_on_no_batch(
    tiny: dict[str, Path],
) -> None:
    settings = ENGINE | {"deterministic": True}
    with Rollout(str(tiny["glm4_moe"]), **settings) as plain:
        wanted = plain.generate(PROMPTS, SAMPLED)
    with Rollout(str(tiny["glm4_moe"]), **settings, **DRAFTS) as engine:
        found = engine.generate(PROMPTS, SAMPLED)
        assert rates(engine)[1] > 50
    assert [s.logprobs.raw for o in found for s in o.outputs] == [
        s.logprobs.raw for o in wanted for s in o.outputs
    ]


def test_a_check_counts_the_head_and_what_it_reads(tiny: dict[str, Path]) -> None:
    def checked(**more: Any) -> Preflight:
        settings = {**ENGINE, **more, "kv_cache_bytes": 1 << 20, "num_kv_blocks": None}
        return check(EngineConfig(model=str(tiny["glm4_moe"]), **settings))

    own, both = checked(), checked(**DRAFTS)
    with Rollout(str(tiny["glm4_moe"]), **ENGINE, **DRAFTS) as engine:
        plan = engine._async.backend.core.memory
    assert both.memory.weights == plan.weights > own.memory.weights
    layer, hidden = 2 * 2 * 16 * 4, 64 * 4
    assert both.kv_bytes_per_token == own.kv_bytes_per_token + layer + hidden
    assert any("mtp: prediction head" in line for line in both.lines())


@pytest.mark.parametrize("arch", ["glm4_moe", "qwen3_next"])
def test_a_check_says_what_of_a_heads_files_does_not_fit(tmp_path: Path, arch: str) -> None:
    """Every fault at once, as of the model's own files."""
    write_release(tmp_path, arch)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith(("eh_proj.weight", "mtp.fc.weight")))
    tensors[name] = tensors[name][:-1].contiguous()
    tensors[name.replace("weight", "bias")] = torch.ones(3)
    save_file(tensors, file, {"format": "pt"})
    told = rf"do not fit: unknown {name.replace('weight', 'bias')}; {name} is \[63, 128\], not \[64"
    with pytest.raises(WeightMismatch, match=told):
        check(EngineConfig(model=str(tmp_path), **ENGINE, **DRAFTS))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.more)])
def test_a_saved_engine_starts_with_its_head(
    tiny: dict[str, Path], tmp_path: Path, ranks: int
) -> None:
    settings = ENGINE | DRAFTS | {"tensor_parallel_size": ranks}
    with Rollout(str(tiny["right_glm4_moe"]), **settings) as engine:
        wanted = answers(engine.generate(PROMPTS, GREEDY))
        engine.save_sharded_state(str(tmp_path))
    with Rollout(tmp_path, **settings) as engine:
        assert answers(engine.generate(PROMPTS, GREEDY)) == wanted
        accepted, drafted = rates(engine)
        assert accepted == drafted > 0


@pytest.mark.parametrize(
    ("model", "settings", "told"),
    [
        ("llama", {}, "LlamaForCausalLM has no such layers"),
        ("headless", {}, "no tensors of layers that predict further tokens"),
        ("glm4_moe", {"num_speculative_tokens": 0}, "drafts num_speculative_tokens, of 1 or more"),
        (
            "llama",
            {"components": {"mtp": "glm4_moe"}},
            "is of Glm4MoeForCausalLM, and the model is LlamaForCausalLM",
        ),
    ],
)
def test_what_cannot_draft_is_refused(
    tiny: dict[str, Path], model: str, settings: dict[str, Any], told: str
) -> None:
    if "components" in settings:
        settings = {"components": {"mtp": str(tiny[settings["components"]["mtp"]])}}
    with pytest.raises(ConfigError, match=told):
        Rollout(str(tiny[model]), **{**ENGINE, **DRAFTS, **settings})


def test_the_head_of_a_model_at_a_url_is_refused(
    tiny: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are nowhere on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="glm4_moe is a URL, and components are read from"):
        check(EngineConfig(model=f"local://{tiny['glm4_moe']}", **ENGINE, **DRAFTS))
