"""An engine that holds a draft, and a head of unknown kind, beside its policy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from adapted_models import adapted
from safetensors.torch import load_file, save_file
from start_engines import outcome, start
from tiny_heads import write_release
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.distributed import TensorParallel
from rollout.engine.worker.held_component import HeldComponent
from rollout.errors import ConfigError, EngineBroken, SourceFailed, WeightMismatch
from rollout.models.config.model import ModelConfig
from rollout.testing.faults import Fault, Faulty


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.fixture(scope="module")
def beside(tmp_path_factory) -> dict[str, Path]:
    """Two drafts of another architecture, and a head's tensors without any config."""
    where = tmp_path_factory.mktemp("beside")
    for name, seed in (("draft_a", 2), ("draft_b", 3)):
        write_tiny(where / name, "llama", seed=seed, num_layers=1)
    (where / "head").mkdir()
    save_file(head(0.5), where / "head" / "mtp.safetensors")
    return {name: where / name for name in ("draft_a", "draft_b", "head")}


def head(value: float) -> dict[str, torch.Tensor]:
    """Two that are trained, and a map between vocabularies, which is not and begins a name."""
    return {
        "mtp.fc.weight": torch.full((6, 8), value),
        "mtp.d2t_norm.weight": torch.full((6,), -value),
        "mtp.d2t": torch.arange(5),
    }


@pytest.fixture(scope="module", params=[(1, "int8"), (2, "none")], ids=["tp1-int8", "tp2"])
def engine(request, checkpoints, beside):
    size, scheme = request.param
    components = {"draft": beside["draft_a"], "mtp": str(beside["head"])}
    settings = {"components": components, "max_adapters": 2, "quantization": scheme}
    with start(checkpoints["a"], size, **settings) as rollout:
        yield rollout


def everything(checkpoints, beside, name: str, value: float):
    return {
        "policy": weights(checkpoints[name]),
        "draft": str(beside[f"draft_{name}"]),
        "mtp": head(value),
    }


def test_policy_draft_and_head_change_together(engine, checkpoints, beside) -> None:
    assert engine.weight_info().components == ("policy", "draft", "mtp")
    first = everything(checkpoints, beside, "a", 0.5)
    assert engine.check_weights(first).equal  # as it was started
    started = outcome(engine)
    second = everything(checkpoints, beside, "b", 0.75)
    assert engine.preflight(second).equal
    with Rollout.connect(engine.address) as client:
        receipt = client.update_weights(second, bucket_bytes=1 << 14)
        assert client.receipts()[-1] == receipt
        report = client.check_weights({**second, "mtp": head(0.25)})
    assert set(receipt.components) == {"policy", "draft", "mtp"}
    assert receipt.components["mtp"].num_tensors == 2
    assert engine.check_weights(second).equal
    assert report.differing == ("mtp:mtp.fc.weight", "mtp:mtp.d2t_norm.weight")
    assert outcome(engine) != started
    engine.rollback()
    assert engine.check_weights(first).equal
    assert outcome(engine) == started


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
def test_policy_draft_and_adapter_change_at_one_commit_and_go_back_together(
    engine, checkpoints, beside
) -> None:
    first = everything(checkpoints, beside, "a", 0.5)
    second = everything(checkpoints, beside, "b", 0.75)
    math = adapted(checkpoints["b"], 8)
    engine.update_weights(first)
    started = outcome(engine)
    wrong = {**second, "draft": {"model.norm.weight": torch.ones(3)}}
    with pytest.raises(WeightMismatch, match=r"draft:model\.norm\.weight has shape"):
        engine.update_weights(wrong, adapters={"math": math})
    assert (engine.weight_info().adapters, outcome(engine)) == ({}, started)
    receipt = engine.update_weights(second, adapters={"math": math})
    assert {*receipt.components, *receipt.adapters} == {"policy", "draft", "mtp", "math"}
    assert engine.weight_info().adapters == {"math": receipt.version}
    assert engine.check_weights(second).equal
    asked = SamplingParams(adapter="math", max_tokens=2, temperature=0.0)
    assert engine.generate([[5, 9, 20]], asked)[0].outputs[0].adapter == f"math@{receipt.version}"
    engine.rollback()
    assert engine.weight_info().adapters == {}
    assert engine.check_weights(first).equal
    assert outcome(engine) == started


def test_an_update_that_fails_in_the_draft_changes_no_component(engine, checkpoints, beside):
    before = outcome(engine)
    first = everything(checkpoints, beside, "a", 0.5)
    engine.update_weights(first)
    version = engine.weight_version
    second = everything(checkpoints, beside, "b", 0.75)
    last = Faulty("inline", Fault("flip", bucket=8))  # the draft's: it comes after the policy
    with pytest.raises(Exception, match=r"draft:|mtp:"):
        engine.update_weights(second, transport=last, bucket_bytes=1 << 16)
    wrong = weights(beside["draft_b"])
    wrong["model.norm.weight"] = torch.ones(3)
    with pytest.raises(WeightMismatch, match=r"draft:model\.norm\.weight has shape \(3,\)"):
        engine.update_weights({**second, "draft": wrong})
    assert engine.weight_version == version
    assert engine.check_weights(first).equal
    assert outcome(engine) == before


def test_a_head_alone_changes_beside_a_policy_that_stays(engine, checkpoints, beside) -> None:
    engine.update_weights(everything(checkpoints, beside, "a", 0.5))
    said = outcome(engine)
    assert set(engine.update_weights({"mtp": head(2.0)}).components) == {"mtp"}
    assert engine.check_weights(everything(checkpoints, beside, "a", 2.0)).equal
    assert outcome(engine) == said
    engine.update_weights(weights(checkpoints["b"]))  # as a trainer that knows the policy alone
    want = {**everything(checkpoints, beside, "a", 2.0), "policy": weights(checkpoints["b"])}
    assert engine.check_weights(want).equal


def test_after_their_weights_were_dropped_all_components_have_to_come(engine, checkpoints, beside):
    engine.sleep(level=2)
    engine.wake_up()
    with pytest.raises(EngineBroken, match="full update of policy and draft and mtp"):
        engine.update_weights(weights(checkpoints["a"]))
    engine.update_weights(everything(checkpoints, beside, "b", 1.0))
    assert engine.check_weights(everything(checkpoints, beside, "b", 1.0)).equal


def test_a_distributed_policy_and_draft_commit_once(engine, jobs, checkpoints, beside) -> None:
    engine.update_weights(everything(checkpoints, beside, "a", 0.5))
    job = jobs["fsdp2"]
    job.ask(op="load", path=str(checkpoints["b"]))
    job.ask(op="beside", path=str(beside["draft_b"]))
    for transport in ("broadcast", "p2p"):  # gathered, and not
        version = engine.weight_version
        answers = job.ask(
            op="update", address=engine.address, transport=transport, timeout=20,
            bucket_bytes=1 << 15, beside=True,
        )  # fmt: skip
        assert answers[0]["receipt"] == answers[1]["receipt"]
        assert set(answers[0]["receipt"]["components"]) == {"policy", "draft"}
        assert engine.weight_version == version + 1
        assert engine.check_weights(everything(checkpoints, beside, "b", 0.5)).equal
        engine.update_weights(everything(checkpoints, beside, "a", 0.5))


def release(path: Path, seed: int) -> dict[str, dict[str, torch.Tensor]]:
    """A model with one layer behind its last, as GLM-4.5's files have it: both components."""
    write_tiny(path, "glm4_moe", seed=seed, num_nextn_predict_layers=1)
    policy = weights(path)
    mtp = {
        name.replace("layers.1.", "layers.2."): 0.5 * tensor
        for name, tensor in policy.items()
        if "layers.1." in name
    }
    mtp["model.layers.2.eh_proj.weight"] = torch.full((64, 128), 0.1 * seed)
    save_file(policy | mtp, path / "model.safetensors", {"format": "pt"})
    return {"policy": policy, "mtp": mtp}


def test_the_head_that_a_release_comes_with_is_a_component_of_it(tmp_path) -> None:
    """Its tensors alone, or among all of a release's."""
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    first, second = release(tmp_path / "a", 0), release(tmp_path / "b", 1)
    with start(tmp_path / "a", 1, components={"mtp": a}) as engine:
        assert engine.check_weights(first).equal
        started = outcome(engine)
        receipt = engine.update_weights(second)
        assert receipt.components["mtp"].num_tensors == len(second["mtp"])
        assert engine.check_weights({"policy": b, "mtp": b}).equal
        assert outcome(engine) != started
        assert not engine.check_weights({"mtp": a}).equal
        engine.update_weights({"policy": a, "mtp": a})
        assert engine.check_weights(first).equal
        assert outcome(engine) == started
        name = "model.layers.2.eh_proj.weight"
        wrong = {**second["mtp"], name: torch.ones(3)}
        with pytest.raises(WeightMismatch, match=rf"mtp:{name} has shape \(3,\)"):
            engine.update_weights({"policy": second["policy"], "mtp": wrong})
        assert engine.check_weights(first).equal


def test_a_head_that_is_merely_held_stays_where_one_is_sent_among_the_policys_tensors(
    tmp_path: Path,
) -> None:
    """Trainers do not have the copies that its files may have of the policy's own tensors."""
    write_release(tmp_path, "glm4_moe", copies=True)
    held = weights(tmp_path)
    [root] = ModelConfig.from_directory(tmp_path).further_prefixes
    copied = f"{root}embed_tokens.", f"{root}shared_head.head."
    sent = {name: t + 1 for name, t in held.items() if not name.startswith(copied)}
    assert len(sent) == len(held) - 2
    with start(tmp_path, 1, components={"mtp": str(tmp_path)}) as engine:
        for tensors in (sent, iter(sent.items())):
            assert set(engine.update_weights(tensors).components) == {"policy"}
        assert engine.check_weights({"policy": sent, "mtp": held}).equal
        alone = {name: t for name, t in held.items() if name.startswith(root)}
        for tensors in (alone, iter(alone.items())):
            with pytest.raises(SourceFailed, match=rf"passes over {root}.*draft_component='mtp'"):
                engine.update_weights(tensors, partial=True)


def test_a_model_without_a_head_is_told_so(tmp_path) -> None:
    """Qwen3-Next's files call it ``mtp``."""
    write_tiny(tmp_path / "next", "qwen3_next")
    write_tiny(tmp_path / "llama", "llama")
    for name, match in (("next", r"further tokens \(mtp\.\)"), ("llama", "has no such layers")):
        with pytest.raises(ConfigError, match=match):
            HeldComponent.at("mtp", tmp_path / name, TensorParallel(), False)
    file = tmp_path / "next" / "model.safetensors"
    save_file(load_file(file) | head(0.5), file, {"format": "pt"})
    found = HeldComponent.at("mtp", tmp_path / "next", TensorParallel(), False)
    assert {meta.name for meta in found.tensors} == set(head(0.5))


def test_a_head_without_files_is_told_what_they_are_for(tmp_path) -> None:
    """Its values are made up, its names are not."""
    write_release(tmp_path, "glm4_moe")
    settings = {"load_format": "dummy", "draft_component": "mtp", "num_speculative_tokens": 2}
    with start(tmp_path, 1, **settings) as engine:
        assert engine.generate([[5, 9, 20]], SamplingParams(max_tokens=4))[0].outputs[0].token_ids
    (tmp_path / "model.safetensors").unlink()
    told = (
        "say which tensors its head has, .*'dummy' makes up.* put them there, or name a directory"
    )
    with pytest.raises(ConfigError, match=told):
        start(tmp_path, 1, **settings)


def test_a_component_that_cannot_be_is_refused_at_the_start(checkpoints, tmp_path) -> None:
    for components, match in (
        ({"policy": "x"}, "cannot name a component"),
        ({"a:b": "x"}, "cannot name a component"),
        ({"draft": ""}, "needs a checkpoint directory"),
        ({"draft": str(tmp_path)}, r"holds no \*\.safetensors"),
    ):
        with pytest.raises(ConfigError, match=match):
            start(checkpoints["a"], 1, components=components)
