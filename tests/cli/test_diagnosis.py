"""Faults planted in a trainer's model, each of which has to be named."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import write_tiny
from tiny_vision import write_vision

from rollout import ConfigError, Rollout, SamplingParams
from rollout.api.diagnosing.diagnosis import diagnose
from rollout.cli.main import main

COOL = SamplingParams(temperature=0.6, max_tokens=16, ignore_eos=True)
NARROW = SamplingParams(top_p=0.5, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def stacks(tmp_path_factory):
    """Engines, each with the model that its checkpoint was written from."""
    where, engines = tmp_path_factory.mktemp("diagnosis"), {}
    for arch, tied in (("qwen3", True), ("gemma2", False), ("glm4_moe", False)):
        model = write_tiny(where / arch, arch, seed=2, tied=tied)
        engine = Rollout(where / arch, device="cpu", num_threads=1, skip_tokenizer_init=True)
        engines[arch] = (engine, model, where / arch)
    yield engines
    for engine, _, _ in engines.values():
        engine.shutdown()


def _on_output(module: Any, change: Callable[[Any], Any]) -> None:
    module.register_forward_hook(lambda _, args, out: change(out))


def _change(model: Any) -> None:
    model.model.layers[1].mlp.down_proj.weight.data *= 1.01


def _swap(model: Any) -> None:
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def _theta(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq**1.3


def _epsilon(model: Any) -> None:
    model.model.layers[0].post_attention_layernorm.variance_epsilon = 0.1


def _scale(model: Any) -> None:
    _on_output(model.lm_head, lambda out: out * 1.25)


def _untie(model: Any) -> None:
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 0.9)


def _truncate(model: Any) -> None:
    model.resize_token_embeddings(300)


def _permute(model: Any) -> None:
    _on_output(model.model.layers[1].self_attn.q_proj, lambda out: out.roll(16, -1))


def _narrow_head(model: Any) -> None:
    _on_output(model.lm_head, lambda out: out.to(torch.bfloat16))


def _uncap(model: Any) -> None:
    model.config.final_logit_softcapping = None


def _attention_scale(model: Any) -> None:
    model.model.layers[1].self_attn.scaling *= 1.5


def _activation(model: Any) -> None:
    model.model.layers[0].mlp.act_fn = torch.nn.ReLU()


def _no_bias(model: Any) -> None:
    [layer] = [one for one in model.model.layers if hasattr(one.mlp, "gate")][:1]
    layer.mlp.gate.e_score_correction_bias.zero_()


def _skip_a_layer(model: Any) -> None:
    model.config.num_hidden_layers = 1


def _drop_a_layer(model: Any) -> None:
    del model.model.layers[1]


def _add_a_layer(model: Any) -> None:
    model.model.layers.append(copy.deepcopy(model.model.layers[1]))


def _experts(model: Any) -> None:
    [layer] = [one for one in model.model.layers if hasattr(one.mlp, "gate")][:1]
    _on_output(layer.mlp.experts, lambda out: out * 1.1)


FAULTS = {  # what is planted, where, and what the report has to say
    "a changed tensor": ("qwen3", _change, "weights", "model.layers.1.mlp.down_proj.weight"),
    "gate and up swapped": ("qwen3", _swap, "weights", "are in each other's places"),
    "another rope theta": ("qwen3", _theta, "rope", "theta"),
    "another epsilon": ("qwen3", _epsilon, "norm", "layers.0.post_attention_layernorm"),
    "a scaled head": ("qwen3", _scale, "head", "1.25 times"),
    "a tied head not updated": ("qwen3", _untie, "weights", "tied to"),
    "a truncated vocabulary": ("qwen3", _truncate, "weights", "embed_tokens"),
    "heads permuted": ("qwen3", _permute, "attention", "layers.1.self_attn"),
    "a bfloat16 head": ("qwen3", _narrow_head, "head", "float32 here and in bfloat16 there"),
    "no soft cap": ("gemma2", _uncap, "head", "soft cap 30"),
    "another attention scale": ("gemma2", _attention_scale, "attention", "layers.1.self_attn"),
    "another activation": ("gemma2", _activation, "mlp", "layers.0.mlp"),
    "no bias on the experts": ("glm4_moe", _no_bias, "weights", "is all zeros"),
    "a layer that is not run": (
        "qwen3",
        _skip_a_layer,
        "layers",
        "layers.1 ran here alone",
    ),
    "a layer less": ("qwen3", _drop_a_layer, "layers", "the engine alone has model.layers.1; "),
    "a layer more": ("qwen3", _add_a_layer, "layers", "the reference alone has model.layers.2; "),
    "experts scaled": ("glm4_moe", _experts, "experts", "mlp"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_with_its_place(stacks, fault):
    arch, plant, kind, told = FAULTS[fault]
    engine, model, _ = stacks[arch]
    model = copy.deepcopy(model)
    with torch.no_grad():
        plant(model)
    found = diagnose(engine, model, sequences=2, params=SamplingParams(max_tokens=8))
    said = "\n".join(found.lines())
    assert found.verdict is not None, said
    assert (found.verdict.kind, told in said) == (kind, True), said
    assert found.remedy in said


def test_a_wrapped_reference_of_which_no_layer_is_found_is_refused(stacks):
    engine, model, _ = stacks["qwen3"]

    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return model(*args, **kwargs)

        def get_output_embeddings(self) -> Any:
            return model.lm_head

    with pytest.raises(ConfigError, match="give the transformers model itself, without what wraps"):
        diagnose(engine, Wrapped(), sequences=1, params=SamplingParams(max_tokens=4))


@pytest.mark.more
def test_a_mixture_on_two_ranks_is_diagnosed_with_its_experts(tmp_path):
    """Equal stacks; then a fault in the experts, whose module files name in another way; then a
    trainer whose routers choose by noise, which is told apart from what one module computes."""
    model = write_tiny(tmp_path, "mixtral", seed=2)
    params = SamplingParams(max_tokens=8)
    with Rollout(
        tmp_path, device="cpu", num_threads=1, skip_tokenizer_init=True, tensor_parallel_size=2
    ) as engine:
        found = diagnose(engine, model, sequences=2, params=params)
        assert (found.verdict, found.rerouted, found.flips) == (None, None, 0)
        assert {"router", "experts"} <= {place.kind for place in found.places}
        scaled = copy.deepcopy(model)
        _on_output(scaled.model.layers[1].mlp.experts, lambda out: out * 1.1)
        verdict = diagnose(engine, scaled, sequences=2, params=params).verdict
        assert (verdict.kind, verdict.name) == ("experts", "layers.1.mlp")
        noisy = copy.deepcopy(model)
        gate = noisy.model.layers[0].mlp.gate
        gate.register_forward_pre_hook(lambda _, args: (args[0].roll(1, -1),))
        found = diagnose(engine, noisy, sequences=2, params=params)
        said = "\n".join(found.lines())
        assert (found.verdict.kind, found.verdict.name) == ("router", "layers.0.mlp.gate"), said
        assert found.flips > 0
        count = found.rerouted[0]
        assert 0 < count <= found.tokens
        assert f"the rollout drew {count} of {found.tokens} tokens by others" in said


def test_what_samples_were_drawn_by_is_told_from_the_weights(stacks):
    engine, model, _ = stacks["qwen3"]
    found = diagnose(engine, model, params=COOL, trainer_temperature=1.0)
    assert found.verdict.kind == "sampler"
    assert "temperature: the trainer's logits are divided by 1, " in found.verdict.detail
    found = diagnose(engine, model, params=NARROW)
    assert found.verdict.kind == "sampler"
    assert "kept mass" in found.verdict.detail
    assert diagnose(engine, model, params=COOL).verdict is None
    with pytest.raises(ConfigError, match="sequences must be 1 or more, got 0"):
        diagnose(engine, model, sequences=0)
    for wrong in (0.0, float("nan")):
        with pytest.raises(ConfigError, match="trainer_temperature must be above 0"):
            diagnose(engine, model, trainer_temperature=wrong)


@pytest.mark.parametrize("arch", ["qwen3", "gemma2", "glm4_moe"])
def test_stacks_that_are_the_same_differ_in_nothing(stacks, arch, capsys):
    engine, _, directory = stacks[arch]
    status = main(["diagnose", engine.address, "--model", str(directory), "--tokens", "8"])
    said = capsys.readouterr().out
    assert "nothing differs beyond rounding" in said
    assert status == 0
    assert "weights: equal" in said


def test_the_command_names_and_draws_the_first_place_that_differs(stacks, tmp_path, capsys):
    engine, _, directory = stacks["qwen3"]
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    values["rope_parameters"]["rope_theta"] *= 50
    (tmp_path / "config.json").write_text(json.dumps(values))
    asked = ["diagnose", engine.address, "--model", str(tmp_path), "--tokens", "8"]
    assert main([*asked, "--checkpoint", str(directory)]) == 1
    said = capsys.readouterr().out
    assert "first difference: rope at " in said
    assert re.search(r"^  \S*rotary_emb +#+ .* x rounding$", said, re.MULTILINE)
    assert 'hf_overrides={"rope_parameters": {"rope_theta": ...}} here' in said
    theta = {"rope_theta": values["rope_parameters"]["rope_theta"]}
    settings = {"device": "cpu", "num_threads": 1, "skip_tokenizer_init": True}
    with Rollout(directory, hf_overrides={"rope_parameters": theta}, **settings) as mended:
        trainer = ["--model", str(tmp_path), "--checkpoint", str(directory), "--tokens", "8"]
        assert main(["diagnose", mended.address, *trainer]) == 0
    capsys.readouterr()
    assert main(asked) == 1  # which takes the service to run by the trainer's own config
    assert "say which: --checkpoint DIR" in capsys.readouterr().out


def test_the_text_of_a_model_that_sees_images_is_compared(tmp_path, capsys):
    """Of a directory, as of a module; prompts that are drawn have no places of images."""
    model = write_vision(tmp_path, seed=2)
    with Rollout(tmp_path, device="cpu", dtype="float32", num_threads=1) as engine:
        asked = ["diagnose", engine.address, "--model", str(tmp_path), "--sequences", "32"]
        assert main([*asked, "--tokens", "2"]) == 0
        assert "nothing differs beyond rounding" in capsys.readouterr().out
        model.model.language_model.layers[1].self_attn.scaling *= 1.5
        found = diagnose(engine, model, sequences=1, params=SamplingParams(max_tokens=8))
    assert found.verdict is not None
    assert (found.verdict.kind, found.verdict.name) == ("attention", "layers.1.self_attn")


@pytest.mark.parametrize("arch", ["phimoe", "llama4"])
def test_a_mixture_whose_router_tells_otherwise_agrees_with_itself(arch, tmp_path):
    """Phi-MoE's router is no module that gives logits, Llama 4's gives them behind its scores, and
    attends within chunks, which the sequences are longer than."""
    model = write_tiny(tmp_path, arch, seed=2)
    with Rollout(
        tmp_path, device="cpu", num_threads=1, skip_tokenizer_init=True, block_size=16
    ) as engine:
        found = diagnose(engine, model, sequences=1, params=SamplingParams(max_tokens=8))
    assert found.verdict is None, "\n".join(found.lines())
