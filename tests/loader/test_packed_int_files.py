"""Checkpoints of GPTQ, AWQ and compressed-tensors, whose codes are packed in int32."""

from __future__ import annotations

import json

import pytest
import torch
from packed_files import CONFIGS, GROUP, packed, write_packed
from safetensors.torch import load_file, save_file

from rollout import Rollout
from rollout.config import EngineConfig
from rollout.errors import ConfigError, WeightMismatch
from rollout.loader import open_checkpoint
from rollout.server.preflight import check
from rollout.weights import Box

CPU = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 8, "max_model_len": 64}
LINEAR = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("form", CONFIGS)
def test_a_box_of_a_packed_weight_is_that_of_what_it_stands_for(tmp_path, form, monkeypatch):
    """Boxes that cut words and groups, in bands of a few rows."""
    monkeypatch.setattr("rollout.weights.files.packed_int._BAND", 1 << 10)
    shape = (48, 80)
    tensors, wanted = packed(form, LINEAR, shape, torch.Generator().manual_seed(1))
    save_file({n: t.contiguous() for n, t in tensors.items()}, tmp_path / "model.safetensors")
    config = {"quantization_config": CONFIGS[form]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        [(name, lazy)] = checkpoint.items()
        assert (name, lazy.shape, lazy.dtype) == (f"{LINEAR}.weight", shape, torch.float32)
        for starts, stops in (
            *(((0, 0), shape), ((0, 0), (1, 1)), ((47, 79), shape)),
            *(((5, 13), (39, 67)), ((8, 16), (16, 32)), ((33, 0), (34, 80))),
        ):
            box = Box(starts, stops)
            assert torch.equal(lazy.read(box), wanted[box.slices])


@pytest.mark.parametrize(
    ("form", "arch"), [*((form, "qwen3") for form in CONFIGS), ("gptq", "qwen3_moe")]
)
def test_a_packed_checkpoint_starts_the_engine_of_what_it_stands_for(tmp_path, form, arch):
    floats = write_packed(tmp_path, form, arch)
    assert check(EngineConfig(model=str(tmp_path), device="cpu")).served == "natively"
    with Rollout(str(tmp_path), dtype="float32", **CPU) as engine:
        assert engine.check_weights(floats).equal
        engine.update_weights({name: value * 2 for name, value in floats.items()})
        assert not engine.check_weights(floats).equal
        engine.update_weights(str(tmp_path))
        assert engine.check_weights(floats).equal


@pytest.mark.parametrize("form", ["gptq", "awq", "symmetric"])
def test_packed_tensors_without_their_config_are_told_to_come_as_a_directory(tmp_path, form):
    write_packed(tmp_path, form)
    tensors = load_file(tmp_path / "model.safetensors")
    with Rollout(str(tmp_path), **CPU) as engine:
        for source in (tensors, iter(tensors.items())):
            with pytest.raises(WeightMismatch, match=r"_proj\.\w+ is packed.*pass the directory"):
                engine.update_weights(source)
        assert engine.update_weights(str(tmp_path)).version == 1


def test_biases_of_zeros_that_gptq_adds_are_passed_over_and_no_others(tmp_path):
    write_packed(tmp_path, "gptq")
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(file) | {f"{LINEAR}.bias": torch.zeros(64, dtype=torch.float16)}
    save_file(tensors, file)
    check(EngineConfig(model=str(tmp_path), device="cpu"))
    with Rollout(str(tmp_path), **CPU) as engine:
        assert engine.check_weights(str(tmp_path)).equal
        engine.update_weights(str(tmp_path))
    tensors[f"{LINEAR}.bias"][3] = 1
    save_file(tensors, file)
    for refused in (
        lambda: check(EngineConfig(model=str(tmp_path), device="cpu")),
        lambda: Rollout(str(tmp_path), **CPU),
    ):
        with pytest.raises(WeightMismatch, match=r"unknown .*q_proj\.bias"):
            refused()


def test_a_format_counts_where_no_checkpoint_format_is_said(tmp_path):
    """As transformers reads it; zeros of the two differ by one."""
    made, values = packed("gptq_v2", LINEAR, (48, 80), torch.Generator().manual_seed(1))
    save_file({n: t.contiguous() for n, t in made.items()}, tmp_path / "model.safetensors")
    said = CONFIGS["gptq_v2"] | {"checkpoint_format": None, "format": "gptq_v2"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        ((_, lazy),) = checkpoint.items()
        assert torch.equal(lazy.read(Box.full(lazy.shape)), values)


def test_a_module_that_gptq_packs_otherwise_is_read_as_it_is(tmp_path):
    """As GPTQModel does by ``dynamic``, of ``lm_head`` by itself: 8 bits there, 4 elsewhere."""
    made, values = packed("gptq_v2", LINEAR, (48, 80), torch.Generator().manual_seed(1))
    save_file({n: t.contiguous() for n, t in made.items()}, tmp_path / "model.safetensors")
    own = {"bits": 8, "group_size": GROUP}
    patterns = {"q_proj": {"bits": 2}, r"-:.*k_proj": {}, r"+:.*\.q_proj": own, ".*": {"bits": 2}}
    said = CONFIGS["gptq_v2"] | {"bits": 4, "group_size": 64, "dynamic": patterns}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        ((_, lazy),) = checkpoint.items()
        assert torch.equal(lazy.read(Box.full(lazy.shape)), values)


def test_weights_of_one_checkpoint_may_have_groups_of_several_sizes(tmp_path):
    """As llm-compressor writes several ``config_groups`` of as many bits."""
    generator = torch.Generator().manual_seed(1)
    made, values = packed("symmetric", LINEAR, (48, 80), generator)
    save_file({n: t.contiguous() for n, t in made.items()}, tmp_path / "model.safetensors")
    [group] = CONFIGS["symmetric"]["config_groups"].values()
    others = [{"strategy": "channel", "group_size": None}, {"group_size": 4 * GROUP}]
    groups = [{"weights": group["weights"] | other} for other in others] + [group]
    said = CONFIGS["symmetric"] | {"config_groups": dict(enumerate(groups))}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    with open_checkpoint(str(tmp_path)) as checkpoint:
        ((_, lazy),) = checkpoint.items()
        assert torch.equal(lazy.read(Box.full(lazy.shape)), values)


@pytest.mark.parametrize(
    ("form", "config", "tensors", "match"),
    [
        ("gptq", {"bits": 3}, {}, "codes of 3 bits are not supported"),
        ("awq", {"version": "gemv"}, {}, "version 'gemv', is not supported"),
        ("awq", {"version": None, "format": "gemv"}, {}, "version 'gemv', is not supported"),
        (
            "gptq",
            {"checkpoint_format": "marlin"},
            {},
            "checkpoint_format 'marlin' is not supported",
        ),
        ("gptq", {"quant_method": "hqq"}, {}, "quant_method='hqq'"),
        ("symmetric", {"format": "nvfp4-pack-quantized"}, {}, "format='nvfp4-pack-quantized'"),
        ("gptq", {"group_size": 128}, {}, r"scales has shape \[5, 48\], .* need \[1, 48\]"),
        ("awq", {}, {"qzeros": None}, r"qzeros is missing"),
        ("asymmetric", {}, {"weight_shape": torch.tensor([48, 90])}, "no group of the config.json"),
        (
            "symmetric",
            {},
            {"weight_scale": torch.ones(1)},
            r"by group or channel, that fit .*weight_scale \[1\] of a weight \[48, 80\]",
        ),
        (
            "symmetric",
            {},
            {"weight_scale": torch.ones(48, 5, dtype=torch.int8)},
            "dtype torch.int8",
        ),
    ],
)
def test_packed_files_that_do_not_fit_are_named(tmp_path, form, config, tensors, match):
    made, _ = packed(form, LINEAR, (48, 80), torch.Generator().manual_seed(1))
    made |= {f"{LINEAR}.{name}": tensor for name, tensor in tensors.items()}
    made = {name: tensor.contiguous() for name, tensor in made.items() if tensor is not None}
    save_file(made, tmp_path / "model.safetensors")
    said = {"quantization_config": CONFIGS[form] | config}
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ConfigError, match=match):
        open_checkpoint(str(tmp_path))
