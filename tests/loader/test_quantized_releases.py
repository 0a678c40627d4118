"""Releases in fewer bits, as their makers write them: what is said of them, and what they give."""

from __future__ import annotations

import json

import pytest
import torch
from packed_files import write_packed
from quantized_files import CONFIGS, write_mxfp4_release, write_release
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from rollout import Rollout, SamplingParams
from rollout.config import EngineConfig
from rollout.errors import ConfigError
from rollout.loader import open_checkpoint
from rollout.server.preflight import check
from rollout.weights import Box
from rollout.weights.files import open_weights

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 64}
PROMPT = [5, 9, 200, 31, 7]


def judged(path, **settings):
    return check(EngineConfig(model=str(path), device="cpu", max_model_len=64, **settings))


@pytest.mark.parametrize(
    ("arch", "scheme", "shape"),
    [
        ("deepseek_v3", "fp8_block", {}),
        ("qwen3", "fp8_block", WIDE | {"num_key_value_heads": 4}),
        ("qwen3", "fp8", {}),
        ("llama", "int8", {}),
    ],
    ids=["DeepSeek-V3", "Qwen3-FP8", "FP8-dynamic", "W8A8"],
)
def test_check_says_how_a_release_is_held_and_what_each_rank_takes(tmp_path, arch, scheme, shape):
    files = write_release(tmp_path, scheme, arch, **shape)
    one = judged(tmp_path, quantization="auto")
    assert one.served == "natively"
    assert one.held == f"{scheme}, the files' own codes"
    floats = judged(tmp_path)
    assert floats.held.startswith(f"bfloat16, dequantised from {scheme}")
    assert floats.rank_bytes[0] - one.rank_bytes[0] > sum(
        tensor.numel() for tensor in files.values() if tensor.dtype == CODES[scheme]
    ) * 0.5  # fmt: skip
    if arch != "deepseek_v3":  # whose latents are narrower than a block
        two = judged(tmp_path, quantization="auto", tensor_parallel_size=2)
        halves = [size / one.rank_bytes[0] for size in two.rank_bytes]
        assert all(0.5 <= half < 0.75 for half in halves)
        [line] = [line for line in two.lines() if line.startswith("weights")]
        assert f"weights        {scheme}, the files' own codes; rank 0: " in line
        assert ", rank 1: " in line


CODES = {"fp8_block": torch.float8_e4m3fn, "fp8": torch.float8_e4m3fn, "int8": torch.int8}


def test_check_says_of_mxfp4_that_its_experts_are_held_as_they_are(tmp_path):
    """Where ranks would cut what shares a scale, auto takes the values; attention has 16 bits."""
    write_mxfp4_release(tmp_path, hidden_size=64, intermediate_size=64)
    own, four = judged(tmp_path, quantization="auto"), judged(tmp_path, quantization="mxfp4")
    assert (own.served, own.held) == ("natively", "mxfp4, the files' own codes")
    assert (four.held, four.rank_bytes) == (own.held, own.rank_bytes)
    floats = judged(tmp_path)
    assert floats.held == (
        "bfloat16, dequantised from mxfp4 (--quantization auto keeps what the files have)"
    )
    assert own.rank_bytes[0] < floats.rank_bytes[0] / 1.5
    cut = {"quantization": "auto", "tensor_parallel_size": 4}
    assert judged(tmp_path, **cut).held == "bfloat16, dequantised from mxfp4"
    assert judged(tmp_path, **cut, expert_parallel=True).held == own.held
    with pytest.raises(ConfigError, match=r"mxfp4.*choose another tensor_parallel_size"):
        judged(tmp_path, quantization="mxfp4", tensor_parallel_size=4)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"weights": {"num_bits": 4, "strategy": "group"}},
            "in format 'int-quantized' with weights of 4 bits by group is not supported",
        ),
        ({"weights": {"num_bits": 8, "strategy": "channel", "symmetric": False}}, "zero points"),
        ({"weights": None}, "must say one grid of weights, got 0"),
        ({"method": "hqq"}, "quantization_config is not supported.*quant_method is 'hqq'"),
        ({"turned": {"config_groups": {"u": {"type": "hadamard"}}}}, "transform_config of"),
    ],
)
def test_check_refuses_what_no_scheme_here_is(tmp_path, changes, match):
    write_tiny(tmp_path, "llama")
    packed = json.loads(json.dumps(CONFIGS["int8"]))
    packed["quant_method"] = changes.get("method", packed["quant_method"])
    packed["transform_config"] = changes.get("turned", {})
    if "weights" in changes:
        packed["config_groups"]["group_0"]["weights"] = changes["weights"]
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"] = packed
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=match):
        judged(tmp_path)


@pytest.mark.parametrize("form", ["int8", "symmetric"])
def test_files_of_turned_weights_are_refused_wherever_they_are_read(tmp_path, form):
    """As by an update from them, or a check against them, of an engine that started elsewhere."""
    (write_release if form == "int8" else write_packed)(tmp_path, form)
    open_weights(tmp_path)[1].close()
    values = json.loads((tmp_path / "config.json").read_text())
    values["quantization_config"]["transform_config"] = {"config_groups": {"u": {"type": "random"}}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="transform_config of compressed-tensors"):
        open_weights(tmp_path)


def test_a_quantised_model_that_only_transformers_has_is_not_served(tmp_path):
    write_tiny(tmp_path, "llama")
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"architectures": ["BioGptForCausalLM"], "model_type": "biogpt"}
    values["quantization_config"] = CONFIGS["fp8"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="quantization_config is not supported"):
        judged(tmp_path)


def test_a_release_gives_what_transformers_makes_of_it_and_takes_a_trainers_weights(tmp_path):
    """Blocks whose scales are none that our quantiser would choose."""
    files = write_release(tmp_path, "fp8_block", num_key_value_heads=4, **WIDE)
    packed = FineGrainedFP8Config(dequantize=True)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=packed)
    with open_checkpoint(str(tmp_path)) as checkpoint:
        floats = {n: lazy.read(Box.full(lazy.shape)) for n, lazy in checkpoint.items()}
    for name, tensor in oracle.state_dict().items():
        assert torch.equal(floats[name].bfloat16(), tensor.bfloat16()), name
    oracle.float().load_state_dict(floats)
    settings = {"device": "cpu", "dtype": "float32", "quantization": None, "max_model_len": 64}
    with Rollout(str(tmp_path), **settings) as engine:
        started = engine.check_weights(str(tmp_path))
        assert started.equal
        assert not engine.check_weights(floats).equal
        matches(engine, oracle)
        receipt = engine.update_weights(floats)  # as a trainer that holds floats sends them
        assert receipt.details["quantization"] == "fp8_block"
        for source in (files, str(tmp_path)):
            again = engine.update_weights(source)
            assert again.details["quantized_digest"] != receipt.details["quantized_digest"]
            assert engine.check_weights(str(tmp_path)).equal
        matches(engine, oracle)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_codes_may_begin_at_any_byte_of_a_file(tmp_path, scheme):
    """Scales of 16 bits that are odd in number, or a zero point, may lie before them."""
    files = write_release(tmp_path, scheme)
    before = torch.ones(1, dtype=torch.bfloat16 if scheme == "fp8" else torch.int8)
    end = "input_scale" if scheme == "fp8" else "input_zero_point"
    files[f"model.layers.0.mlp.down_proj.{end}"] = before
    save_file(files, tmp_path / "model.safetensors")
    with Rollout(str(tmp_path), device="cpu", quantization="auto", max_model_len=64) as engine:
        assert engine.check_weights(str(tmp_path)).equal


@pytest.mark.parametrize("form", ["fp8", "symmetric"])
def test_scales_of_activations_and_of_the_cache_are_passed_over(tmp_path, form):
    """Static ones of inputs, and those of ``kv_cache_scheme``, whatever packs the weights."""
    (write_packed if form == "symmetric" else write_release)(tmp_path, form)
    file = tmp_path / "model.safetensors"
    files, layer = load_file(file), "model.layers.0"
    with Rollout(str(tmp_path), device="cpu", max_model_len=64) as engine:
        files[f"{layer}.mlp.up_proj.input_scale"] = torch.ones(1)
        files[f"{layer}.mlp.up_proj.input_zero_point"] = torch.ones(1, dtype=torch.int8)
        files[f"{layer}.self_attn.k_scale"] = files[f"{layer}.self_attn.v_scale"] = torch.ones(1)
        save_file({name: tensor.clone() for name, tensor in files.items()}, file)
        for source in (str(tmp_path), files, iter(files.items()))[: 1 if form != "fp8" else 3]:
            assert engine.update_weights(source).version
            assert engine.check_weights(str(tmp_path)).equal


def test_a_release_that_says_scales_of_the_cache_alone_is_one_of_floats(tmp_path):
    source = write_tiny(tmp_path, "qwen3")
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    said = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": scheme}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": said}))
    scales = {f"model.layers.{i}.self_attn.{x}_scale": torch.ones(1) for i in (0, 1) for x in "kv"}
    save_file(load_file(file) | scales, file)
    for kind in ("auto", "fp8"):
        settings = {"dtype": "float32", "max_model_len": 64, "kv_cache_dtype": kind}
        with Rollout(str(tmp_path), device="cpu", quantization="auto", **settings) as engine:
            assert engine.update_weights(source.state_dict() | scales).version == 1
            assert engine.check_weights(str(tmp_path)).equal
            if kind == "auto":
                matches(engine, source)


def matches(engine, oracle) -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    [[said]] = [output.outputs for output in engine.generate([PROMPT], params)]
    logits = oracle(torch.tensor([[*PROMPT, *said.token_ids]])).logits[0, len(PROMPT) - 1 : -1]
    assert logits.argmax(-1).tolist() == list(said.token_ids)
    wanted = logits.log_softmax(-1).amax(-1)
    torch.testing.assert_close(torch.tensor(said.logprobs.raw), wanted, atol=1e-4, rtol=1e-4)
