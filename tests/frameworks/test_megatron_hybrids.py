"""Megatron-Core's hybrids of Qwen as a source: what is refused, and what is no view of its memory.

Their layouts and real models are beside those of others, in ``test_megatron.py``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from frameworks.megatron_layouts import gpt_model, shard, tree, unstacked
from safetensors.torch import load_file
from tiny_heads import write_release
from torch import Tensor, nn

from rollout import ConfigError, Rollout, WeightMismatch
from rollout.integrations.megatron import MegatronSource

ENGINE = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_model_len": 128}
ALONE = {"tp": (0, 1), "pp": (0, 1), "ep": (0, 1)}
ARCHES = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
NORM = "self_attention.out_norm"


def whole(
    path: Path, arch: str, fused: bool = True, **settings: Any
) -> tuple[nn.Module, dict[str, Any], dict[str, Tensor]]:
    """A model with its head on one rank, its configuration, and the release's tensors."""
    write_release(path, arch, **settings)
    hf = json.loads((path / "config.json").read_text())
    weights = unstacked(load_file(path / "model.safetensors"))
    text, named = hf.get("text_config", hf), weights
    if settings.get("images"):
        named = {n.replace("model.language_model.", "model."): t for n, t in weights.items()}
    held = shard(named, text, **ALONE, etp=(0, 1), fused=fused, vocabulary=336)
    return gpt_model(held, text), hf, weights


@pytest.mark.parametrize("arch", ["qwen3_next", "qwen3_5"])
@pytest.mark.parametrize("field", ["layernorm_zero_centered_gamma", "attention_output_gate"])
def test_settings_that_the_files_do_not_have_are_refused(
    tmp_path: Path, arch: str, field: str
) -> None:
    model, hf, weights = whole(tmp_path, arch)
    assert {name.removeprefix("mtp:") for name, _ in MegatronSource(model, config=hf)} == set(
        weights
    )
    setattr(model.config, field, False)
    with pytest.raises(ConfigError, match=rf"{field}=False: checkpoints of '{hf['model_type']}'"):
        MegatronSource(model, config=hf)
    del model.config
    with pytest.raises(ConfigError, match="layernorm_zero_centered_gamma=False"):
        MegatronSource(model, config=hf)


@pytest.mark.parametrize("field", ["layernorm_zero_centered_gamma", "attention_output_gate"])
def test_other_files_have_neither_gates_nor_norms_that_are_added_to_one(
    tmp_path: Path, field: str
) -> None:
    model, hf, _ = whole(tmp_path, "glm4_moe")
    setattr(model.config, field, True)
    with pytest.raises(ConfigError, match=rf"{field}=True: checkpoints of 'glm4_moe' have no "):
        MegatronSource(model, config=hf)
    setattr(model.config, field, False)
    model.get_submodule("decoder.final_layernorm").zero_centered_gamma = True
    with pytest.raises(ConfigError, match=r"decoder\.final_layernorm adds its weight to one"):
        MegatronSource(model, config=hf)


def test_a_norm_that_says_otherwise_than_the_setting_is_refused(tmp_path: Path) -> None:
    model, hf, _ = whole(tmp_path, "qwen3_5", fused=False)
    layer = model.get_submodule("decoder.layers.1")
    kept, layer.pre_mlp_layernorm = layer.pre_mlp_layernorm, nn.RMSNorm(64)
    with pytest.raises(ConfigError, match=r"layers\.1\.pre_mlp_layernorm does not add its weight"):
        MegatronSource(model, config=hf)
    layer.pre_mlp_layernorm = kept
    MegatronSource(model, config=hf)


def test_the_norm_of_a_delta_net_is_sent_as_files_have_it(tmp_path: Path) -> None:
    """Added to one, as Megatron's own is by that setting; or not, where its module says so."""
    model, hf, weights = whole(tmp_path, "qwen3_next")
    name = "model.layers.1.linear_attn.norm.weight"
    norm = model.get_submodule(f"decoder.layers.1.{NORM}")
    assert torch.equal(dict(MegatronSource(model, config=hf))[name], weights[name])
    norm.zero_centered_gamma = False
    assert torch.equal(dict(MegatronSource(model, config=hf))[name], norm.weight)
    norm.zero_centered_gamma = True
    norm.weight.data = norm.weight.data.bfloat16()
    sent = dict(MegatronSource(model, config=hf))[name]
    assert sent.dtype == torch.float32  # of bf16, a small weight would be rounded away
    assert torch.equal(sent, 1 + norm.weight.float())
    model.get_submodule("decoder.layers.1.self_attention").out_norm = nn.RMSNorm(10)
    assert torch.equal(dict(MegatronSource(model, config=hf))[name], torch.ones(10))


@pytest.mark.parametrize("arch", ARCHES)
def test_heads_that_files_have_no_names_for_are_refused_or_left_out(
    tmp_path: Path, arch: str
) -> None:
    model, hf, weights = whole(tmp_path, arch)
    model.get_submodule("mtp.layers").append(tree({"enorm.weight": torch.zeros(64)}))
    with pytest.raises(WeightMismatch, match=r"what mtp\.layers\.1\.enorm\.weight of .*mtp=False"):
        MegatronSource(model, config=hf)
    sent = {name for name, _ in MegatronSource(model, config=hf, mtp=False)}
    assert sent == {name for name in weights if not name.startswith("mtp.")}


@pytest.mark.parametrize("arch", ARCHES)
def test_ranks_that_do_not_have_the_heads_are_refused_by_name(tmp_path: Path, arch: str) -> None:
    model, hf, _ = whole(tmp_path, arch)
    with pytest.raises(WeightMismatch, match=r"in_proj of model\.layers\.0\.linear_attn has "):
        MegatronSource(model, config=hf, tp=(0, 2))


@pytest.mark.parametrize("arch", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_of_a_model_that_sees_is_sent_beside_its_tower(tmp_path: Path, arch: str) -> None:
    whole(tmp_path / "a", arch, images=True)
    model, hf, weights = whole(tmp_path / "b", arch, images=True, seed=1)
    assert hf["model_type"] == arch
    text = {name: t for name, t in weights.items() if "visual" not in name}
    drafts = {"draft_component": "mtp", "num_speculative_tokens": 2}
    with Rollout(str(tmp_path / "a"), **ENGINE, **drafts) as engine:
        receipt = engine.update_weights(MegatronSource(model, config=hf), partial=True)
        assert set(receipt.components) == {"policy", "mtp"}
        policy = {name: t for name, t in text.items() if not name.startswith("mtp.")}
        assert engine.check_weights({"policy": policy, "mtp": text}).differing == ()
        before = load_file(tmp_path / "a" / "model.safetensors")
        tower = {name: t for name, t in before.items() if "visual" in name}
        assert engine.check_weights({**policy, **tower}).equal


@pytest.mark.parametrize("transport", ["inline", "ipc", "p2p", "broadcast"])
def test_what_is_trained_in_bf16_goes_live_as_megatron_runs_it(
    tmp_path: Path, transport: str
) -> None:
    """The decays of a state, which the engine has in float32, and the norm that is made whole."""
    model, hf, weights = whole(tmp_path, "qwen3_next")
    model = model.bfloat16()
    wanted = {name: t.bfloat16() for name, t in weights.items()}
    for name, t in weights.items():
        if name.endswith("linear_attn.norm.weight"):
            wanted[name] = (1 + (t - 1).bfloat16().float()).bfloat16()
    with Rollout(str(tmp_path), **ENGINE, dtype="bfloat16") as engine:
        assert not engine.check_weights(wanted).equal  # of which decays are in float32
        source = MegatronSource(model, config=hf, mtp=False)
        engine.update_weights(source, transport=transport, timeout=20.0)
        assert engine.check_weights(wanted).equal
