"""verl 0.9, its own registries, client and Ray, over ``rollout.integrations.verl``."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clients.install import folder
from frameworks.jobs import run
from safetensors.torch import load_file, save_file
from tiny_heads import write_release
from tiny_models import write_tiny

from rollout import Rollout

ROOT = Path(__file__).parents[2]
CLIENT = folder("verl")


def test_verl_finds_the_plugin_by_its_entry_point() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["verl.plugins"] == {"rollout": "rollout.integrations.verl"}


def test_the_extra_brings_what_verl_imports_and_does_not_ask_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {name.partition(">")[0] for name in project["optional-dependencies"]["verl"]}
    assert {"cachetools", "TransferQueue"} <= names  # verl's own extra verl-core has the second


@dataclass(frozen=True)
class Told:
    """What became of a job, and the models that it was given."""

    models: list[Path]
    found: dict[str, Any]

    def get(self) -> dict[str, Any]:
        assert "traceback" not in self.found, self.found["traceback"]
        return self.found


@pytest.fixture(scope="module")
def replicas(ray_alone: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Told]:
    """Of the jobs of single replicas, by their scripts."""
    path = tmp_path_factory.mktemp("replicas")
    models = {
        "verl_job.py": [path / "one", path / "other"],
        "verl_head_job.py": [path / "a", path / "b"],
        "verl_experts_job.py": [path / "mixture"],
    }
    for seed in range(2):
        write_tiny(models["verl_job.py"][seed], seed=seed, tokenizer=True)
        write_release(models["verl_head_job.py"][seed], "deepseek_v3", seed=seed)
    write_tiny(path / "mixture", "qwen3_moe", mlp_only_layers=[0])
    spoil_token(path / "mixture", 60)
    jobs = [[script, *map(str, given)] for script, given in models.items()]
    found = run("verl_jobs.py", json.dumps(jobs), over=CLIENT, limit=560)
    return {
        script: Told(given, one) for (script, given), one in zip(models.items(), found, strict=True)
    }


@pytest.mark.more
@pytest.mark.timeout(1200)  # others may have Ray first
@pytest.mark.skipif(CLIENT is None, reason="verl is not installed: make clients")
def test_a_replica_serves_verls_client_and_takes_its_weights(replicas: dict[str, Told]) -> None:
    models, got = replicas["verl_job.py"].models, replicas["verl_job.py"].get()
    asked = {"temperature": 1.0, "max_tokens": 8, "seed": 3, "ignore_eos": True}
    told, penalised = [], []
    for path in models:
        with Rollout(str(path), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
            [output] = rollout.generate([[5, 6, 7]], asked)
            told.append(output.outputs[0])
            [output] = rollout.generate([[5, 6, 7]], {**asked, "repetition_penalty": 1.5})
            penalised.append(output.outputs[0])
    for name, sample, step in (("first", told[0], 10), ("second", told[1], 11)):
        output = got[name]
        assert output["token_ids"] == sample.token_ids
        assert output["log_probs"] == pytest.approx(sample.logprobs.processed, abs=1e-5)
        assert output["stop_reason"] == "completed"
        fields = output["extra_fields"]
        assert fields["global_steps"] == fields["min_global_steps"] == step
        assert fields["max_global_steps"] == step
    assert got["failed"] in ("IncompleteUpdate", "WeightMismatch")
    assert got["third"]["token_ids"] == got["second"]["token_ids"]
    # One answer of two parts: what was aborted, and its continuation by the next weights.
    partial = got["partial"]
    assert len(partial["token_ids"]) == len(partial["log_probs"]) == 400
    assert (partial["extra_fields"]["min_global_steps"]) == 11
    assert (partial["extra_fields"]["max_global_steps"]) == 12
    assert (got["rejected"]["token_ids"], got["rejected"]["stop_reason"]) == ([], "aborted")
    for name in ("back", "awake"):
        assert got[name]["token_ids"] == got["first"]["token_ids"]
    assert not got["address"].startswith("127.")  # by which verl's router tells replicas apart
    # Where a request says nothing, verl's configuration does.
    for name in ("penalised", "last"):
        assert got[name]["token_ids"] == penalised[0].token_ids
    assert penalised[0].token_ids != told[0].token_ids
    # Adapters that are not merged: nothing went live without them.
    assert "q_proj.base_layer.weight comes without its adapter" in got["unmerged"]
    assert got["last"]["extra_fields"]["global_steps"] == 12
    # What no replica can be is refused by every part of verl's that is made with it.
    unfit = got["unfit"]
    assert "rollout.data_parallel_size=2: " in unfit["copies"]
    assert "pipeline_model_parallel_size) to the GPUs that one copy needs" in unfit["copies"]
    assert unfit["worker's copies"] == unfit["copies"]
    assert "a replica of 4 ranks spans 2 nodes" in unfit["nodes"]
    assert "set reward.reward_model.rollout.name=vllm or sglang" in unfit["reward"]
    assert "rollout.logprobs_mode=raw_logits: " in unfit["logits"]
    assert "qat.enable=False" in unfit["qat"]
    assert unfit["fits"] is None
    assert got["followed"] == {
        "pipeline_parallel_size": [1, 3],
        "expert_parallel": [False, True],
        "quantization": [None, "fp8"],
        "max_num_batched_tokens": [256, 64],
        "deterministic": [False, True],
        "cuda_graphs": [None, "off"],
        "cuda_graph_sizes": [[], [1, 8]],
        "draft_component": [None, "mtp"],
        "num_speculative_tokens": [None, 3],
    }


@pytest.mark.more
@pytest.mark.timeout(1200)
@pytest.mark.skipif(CLIENT is None, reason="verl is not installed: make clients")
def test_a_head_that_verl_sends_with_the_model_drafts(replicas: dict[str, Told]) -> None:
    """``mtp.enable_rollout``: by its naive engine, asleep before, and by ours."""
    models, got = replicas["verl_head_job.py"].models, replicas["verl_head_job.py"].get()
    asked = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
    with Rollout(str(models[1]), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
        [output] = rollout.generate([[5, 6, 7] * 3], asked)
    for row in got["naive"], got["apart"]:
        assert row["components"] == ["mtp", "policy"]
        assert row["differing"] == []
        assert row["token_ids"] == output.outputs[0].token_ids
        assert row["drafted"] > 0
    # A trainer that has no head leaves it as it was.
    assert got["without"]["components"] == ["policy"]
    assert got["without"]["differing"] == []


@pytest.mark.more
@pytest.mark.timeout(1200)
@pytest.mark.skipif(CLIENT is None, reason="verl is not installed: make clients")
def test_verls_agent_loop_gets_the_experts_of_every_layer_for_its_router_replay(
    replicas: dict[str, Told],
) -> None:
    """``enable_rollout_routing_replay``: rows of all tokens but the last, which verl adds."""
    [model], got = replicas["verl_experts_job.py"].models, replicas["verl_experts_job.py"].get()
    asked = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "return_routed_experts": True}
    with Rollout(str(model), device="cpu", num_threads=1, num_kv_blocks=64) as rollout:
        [sample] = rollout.generate([[5, 6, 7]], asked)[0].outputs
        seeded = got["runs"][0][0]
        [scored] = rollout.generate([[5, 6, 7, *seeded]], {"max_tokens": 1, "prompt_logprobs": 1})
    assert got["token_ids"] == sample.token_ids
    dense = np.zeros_like(sample.routed_experts)
    whole = np.concatenate([dense, sample.routed_experts], axis=1).tolist()
    assert got["experts"] == whole
    assert got["aligned"] == [*whole, np.zeros_like(whole[0]).tolist()]
    assert "logits were not numbers" in got["failed"]  # upon "aborted" verl would ask again
    # ``full_determinism``: the same in every run, but not within a group, whose ids are the same.
    assert got["runs"][0] == got["runs"][1]
    assert len({tuple(ids) for ids in got["runs"][0]}) == 3
    rows = zip(scored.prompt_logprobs[3:], seeded, strict=True)
    raw = [row[token] for row, token in rows]
    assert got["raw"] == pytest.approx(raw, abs=1e-5)  # sampled at temperature 0.5
    assert got["without"] is None


def spoil_token(path: Path, token: int) -> None:
    """A prompt with this token gives logits that are not numbers."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def synced(ray_alone: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of both kinds; one process, for most of its time goes into imports."""
    path = tmp_path_factory.mktemp("verl")
    write_tiny(path, seed=0, tokenizer=True)
    found: dict[str, Any] = run("verl_sync_job.py", path, over=CLIENT, limit=560)[-1]
    return found


@pytest.mark.more
@pytest.mark.timeout(1200)
@pytest.mark.skipif(CLIENT is None, reason="verl is not installed: make clients")
@pytest.mark.parametrize(("kind", "versions"), [("apart", 3), ("hybrid", 2)])
def test_verls_trainer_learns_and_every_step_is_live(
    synced: dict[str, Any], kind: str, versions: int
) -> None:
    """Two FSDP2 ranks of verl's own worker, its losses and manager. Apart: a standalone replica, by
    our checkpoint engine; hybrid: one of two ranks over these workers, which sleeps meanwhile.
    """
    got = synced[kind]
    steps = got["steps"]
    assert [row["global_steps"] for row in steps] == [[n] * 4 for n in range(1, versions + 1)]
    assert (
        len({tuple(row["logprobs"]) for row in steps}) == versions
    )  # every step changed the weights
    assert all(row["grad_norm"] > 0 for row in steps[:-1])
    # What verl's trainer computes of each token is what the engine sampled it with.
    assert max(row["difference"] for row in steps) < 1e-4
    # Weights with NaN: the engine's reason raises in verl's driver, and the last ones serve on.
    assert "hold NaN or infinity" in got["failed"]
    assert got["after"] == [versions] * 4
    # Its ranks see the GPUs of the replica's workers, in their order, and no others.
    assert got["sees"] == ",".join(got["gpus"])
    assert len(got["gpus"]) == (2 if kind == "hybrid" else 1)
    if kind == "hybrid":
        return
    assert all(row["took"]["weight_sync/wire_bytes"] > 0 for row in steps)
    apart = got["apart"]
    assert not apart["host"].startswith("127.")
    assert "token" in apart["refused"]
    assert apart["version"] == 0


@pytest.mark.more
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("ray_alone")
@pytest.mark.skipif(CLIENT is None, reason="verl is not installed: make clients")
def test_verls_main_ppo_trains(tmp_path: Path) -> None:
    """As a whole: agent loops, rewards, two replicas that sleep while the trainer learns."""
    write_tiny(tmp_path / "tiny", tokenizer=True)
    rows = run("verl_main_job.py", tmp_path / "tiny", tmp_path, over=CLIENT, limit=560)
    found = {row["step"]: row["data"] for row in rows}
    for step in (1, 2):
        # What its trainer computes of the sampled tokens is what they were sampled with.
        assert found[step]["training/rollout_probs_diff_max"] < 1e-4
        assert found[step]["rollout_corr/kl"] == pytest.approx(0, abs=1e-4)
        assert found[step]["actor/grad_norm"] > 0
    assert "val-core/toy/acc/mean@1" in found[2]
