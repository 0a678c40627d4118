"""What is read from config.json, and what is refused by name."""

import json

import pytest
import torch
from tiny_models import write_tiny

from rollout.errors import ConfigError
from rollout.models.config.layer import FULL, SLIDES, LayerConfig, RopeConfig
from rollout.models.config.model import ModelConfig

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
QWEN3 = {**LLAMA, "architectures": ["Qwen3ForCausalLM"], "head_dim": 16}


def read(base=LLAMA, **changes):
    return ModelConfig.from_hf({**base, **changes}, file="here/config.json")


def test_a_minimal_llama_config_gets_its_architectures_defaults():
    config = read()
    assert config.architecture == "LlamaForCausalLM"
    assert (config.head_dim, config.num_kv_heads) == (16, 4)
    assert not any((config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm, config.tied))
    assert config.layers == (LayerConfig(window=0, rope=RopeConfig(kind="default", theta=1e4)),) * 2
    assert config.eos_token_ids == ()


@pytest.mark.parametrize(
    ("base", "changes", "biases"),
    [
        (LLAMA, {"attention_bias": True}, (True, True, False)),
        (LLAMA, {"mlp_bias": True}, (False, False, True)),
        ({**LLAMA, "architectures": ["Qwen2ForCausalLM"]}, {}, (True, False, False)),
        (QWEN3, {}, (False, False, False)),
        (QWEN3, {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_follow_the_rules_of_the_architecture(base, changes, biases):
    config = read(base, **changes)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases
    assert config.qk_norm == (config.architecture == "Qwen3ForCausalLM")


@pytest.mark.parametrize("name", [k for k in QWEN3 if k != "architectures"])
def test_a_missing_field_is_named_with_its_file(name):
    values = {k: v for k, v in QWEN3.items() if k != name}
    with pytest.raises(ConfigError, match=f"here/config.json: field '{name}' is missing"):
        ModelConfig.from_hf(values, file="here/config.json")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, got '64'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
        ({"hidden_act": "relu2"}, "hidden_act 'relu2' is not one of silu"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_key_value_heads 3"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_size": 66}, "set head_dim"),
        ({"dtype": "int8"}, "dtype 'int8' is not one of"),
        ({"rope_scaling": {"type": "spiral"}}, "rope_type 'spiral' is not one of default, linear"),
        ({"rope_scaling": {"type": "linear", "factor": "4"}}, "factor must be a number, got '4'"),
        ({"rope_scaling": {"type": "linear"}}, "field 'factor' is missing; rope_type 'linear'"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"eos_token_id": "2"}, "eos_token_id must be an integer or a list"),
    ],
)
def test_what_cannot_be_run_is_refused(changes, match):
    with pytest.raises(ConfigError, match=match):
        read(**changes)


@pytest.mark.parametrize(
    ("arch", "changes", "windows"),
    [
        ("Llama", {"sliding_window": 64, "use_sliding_window": True}, [0, 0]),
        ("Qwen2", {"use_sliding_window": False, "sliding_window": 64}, [0, 0]),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": None}, [0, 0]),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            [0] * 2,
        ),
        (
            "Qwen2",
            {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1},
            [0, 64],
        ),
        ("Qwen2", {"use_sliding_window": True, "layer_types": [SLIDES, FULL]}, [4096, 0]),
        ("Mistral", {}, [4096, 4096]),
        ("Mistral", {"sliding_window": 64, "layer_types": [SLIDES, FULL]}, [64, 64]),
        ("Mistral", {"sliding_window": None}, [0, 0]),
        ("Ministral", {"sliding_window": 64, "layer_types": [SLIDES, FULL]}, [64, 0]),
        ("Gemma2", {"num_hidden_layers": 3, "head_dim": 16}, [4096, 0, 4096]),
        ("Gemma2", {"sliding_window_pattern": 3, "head_dim": 16}, [4096, 0]),
        ("Cohere2", {"sliding_window_pattern": 1, "layer_norm_eps": 1e-5}, [0, 0]),
        ("Gemma3", {"sliding_window": 9, "sliding_window_pattern": 2, "head_dim": 16}, [9, 0]),
    ],
)
def test_how_far_each_layer_sees(arch, changes, windows):
    config = read({**LLAMA, "architectures": [f"{arch}ForCausalLM"]}, **changes)
    assert [layer.window for layer in config.layers] == windows


def test_layers_that_slide_may_have_their_own_positions():
    local, scaled = {"rope_theta": 1e4}, {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
    gemma = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
    gemma["sliding_window_pattern"] = 2
    old = read(gemma, rope_theta=1e6, rope_scaling={"rope_type": "linear", "factor": 8.0})
    new = read(gemma, rope_parameters={SLIDES: local, FULL: scaled})
    assert old.layers == new.layers
    slides, full = new.layers
    assert (slides.rope.kind, slides.rope.theta, slides.rope.scaling) == ("default", 1e4, {})
    assert (full.rope.kind, full.rope.theta, full.rope.scaling["factor"]) == ("linear", 1e6, 8.0)
    with pytest.raises(ConfigError, match="say nothing of full_attention"):
        read(gemma, rope_parameters={SLIDES: local})
    with pytest.raises(ConfigError, match="by type of layer here"):
        read(gemma, rope_parameters=scaled)  # as if of all layers


def test_text_has_one_position_where_images_have_three():
    mrope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    assert read(rope_scaling=mrope).layers == read().layers


def test_released_configs_that_see_images_are_read_nested_and_flat():
    text = {"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144}
    text |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 2}
    text |= {"rms_norm_eps": 1e-6, "max_position_embeddings": 128000, "rope_theta": 1e6}
    tower = {"depth": 32, "hidden_size": 1280, "num_heads": 16, "out_hidden_size": 2048}
    flat = {**text, "model_type": "qwen2_5_vl", "image_token_id": 151655, "vision_config": tower}
    flat["architectures"] = ["Qwen2_5_VLForConditionalGeneration"]
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": [16, 24, 24]}
    old = ModelConfig.from_hf(flat)
    assert old.layers[0].rope.axes == (0,) * 16 + (1,) * 24 + (2,) * 24
    assert (old.vision.image_token, old.vision.patch_values, old.vision.levels) == (151655, 1176, 0)
    mrope = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
    nested = {"image_token_id": 151655, "model_type": "qwen3_vl", "vision_config": tower}
    nested["text_config"] = {**text, "head_dim": 128, "rope_scaling": mrope}
    nested["architectures"] = ["Qwen3VLForConditionalGeneration"]
    new = ModelConfig.from_hf(nested)
    assert new.layers[0].rope.axes == (0, 1, 2) * 20 + (0,) * 4
    assert (new.vision.patch_values, new.vision.levels) == (1536, 3)
    wrong = {**nested, "vision_config": {**tower, "out_hidden_size": 1024}}
    with pytest.raises(ConfigError, match="out_hidden_size 1024 must be the text model's"):
        ModelConfig.from_hf(wrong)


def test_both_forms_of_rope_parameters_read_alike():
    llama3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3["original_max_position_embeddings"] = 128
    old = read(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **llama3})
    older = read(rope_theta=5e5, rope_scaling={"type": "llama3", **llama3})
    new = read(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **llama3})
    assert old.layers == older.layers == new.layers
    assert (new.layers[0].rope.kind, new.layers[0].rope.theta) == ("llama3", 5e5)
    assert new.layers[0].rope.scaling == llama3


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["bfloat16", "torch.bfloat16"])
def test_the_dtype_is_read_under_both_names(key, value):
    assert read(**{key: value}).dtype == torch.bfloat16


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3"])
def test_a_directory_written_by_transformers_is_read(tmp_path, arch):
    source = write_tiny(tmp_path, arch, tied=True, tokenizer=True).config
    config = ModelConfig.from_directory(tmp_path)
    assert config.tied
    assert config.eos_token_ids == (source.eos_token_id,)
    assert (config.vocab_size, config.num_kv_heads, config.head_dim) == (320, 2, 16)


def test_stop_ids_of_the_generation_config_join_those_of_the_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "eos_token_id": 7}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 9], "temperature": 0.1})
    )
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (7, 9)


def test_a_directory_without_a_readable_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json does not exist"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read as JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="does not hold a JSON object"):
        ModelConfig.from_directory(tmp_path)


def test_heads_that_do_not_divide_over_ranks_are_refused_in_the_expected_words():
    config = read(num_attention_heads=40, hidden_size=640)
    with pytest.raises(ConfigError) as caught:
        config.check_tensor_parallel(3)
    assert str(caught.value) == (
        "Total number of attention heads (40) must be divisible by tensor parallel size (3). "
        "Sizes that work: 1, 2, 4, 8."
    )


def test_key_heads_divide_or_are_replicated():
    config = read(num_attention_heads=24, num_key_value_heads=4, hidden_size=96)
    for size in (1, 2, 4, 8):
        config.check_tensor_parallel(size)
    with pytest.raises(ConfigError, match=r"key/value heads \(4\)"):
        config.check_tensor_parallel(6)
    with pytest.raises(ConfigError, match=r"Intermediate size \(100\)"):
        read(num_attention_heads=24, hidden_size=96, intermediate_size=100).check_tensor_parallel(8)


def test_what_releases_leave_out_is_what_their_weights_are():
    """gpt-oss and MiniMax-M2 name no dtype, the first Nemotron-H has another name for head_dim."""
    assert read().dtype == torch.float32
    packed = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert read(quantization_config=packed).dtype == torch.bfloat16
    assert read(quantization_config=packed, torch_dtype="float16").dtype == torch.float16
    nemotron = read(
        architectures=["NemotronHForCausalLM"],
        hybrid_override_pattern="M-*-",
        num_hidden_layers=4,
        attention_head_dim=32,
        layer_norm_epsilon=1e-5,
        mlp_hidden_act="relu2",
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=16,
        conv_kernel=4,
    )
    assert nemotron.head_dim == 32
    assert [layer.recurrent for layer in nemotron.layers] == [True, False, False, False]
