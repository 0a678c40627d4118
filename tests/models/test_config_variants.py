"""A field of a config.json with another value is followed as by transformers, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers_sweep as sweep
from rank_threads import Session, loaded, prompts, reference
from tiny_models import ARCHITECTURES, write_tiny

from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, RolloutError
from rollout.models.config.model import ModelConfig
from rollout.models.registry import Registry

pytestmark = pytest.mark.filterwarnings("ignore")  # of values that nobody has trained with

ACTIVATIONS = ("gelu", "gelu_pytorch_tanh", "relu", "silu")
# Of what a config may have as null, or of another kind than its default.
GIVEN: dict[str, Any] = {
    "sliding_window": 6, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 3.0,
    "head_dim": 24, "clip_qkv": 1.0, "q_lora_rank": 16,
}  # fmt: skip
ORIGINAL = {"original_max_position_embeddings": 8}
ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "beta_fast": 16, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "mscale": 0.7, "mscale_all_dim": 1.2},
    {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "truncate": False},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | ORIGINAL,
    {"partial_rotary_factor": 0.5},
    {"rope_theta": 50.0},
)
# What changes nothing that a model computes here, what makes it large, and what transformers
# itself follows in one of its attentions alone.
LEFT = (
    "dropout", "initializer", "cache", "output_", "return_dict", "is_", "token_id", "dtype",
    "vocab_size", "chunk_size", "aux", "jitter", "std", "hidden_size", "num_hidden_layers",
    "max_position", "cross_attention", "use_sliding_window", "index_n_heads", "transformers",
)  # fmt: skip
MOST_COUNT = 8  # larger ones are sizes


def native_types() -> list[tuple[str, str]]:
    registry = Registry()
    return [(kind, arch) for kind, arch in sweep.model_types() if registry.knows([arch])]


def variants(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The changes of one field at a time."""
    for name, value in values.items():
        if not isinstance(name, str) or any(part in name for part in LEFT):
            continue
        for other in others(name, value):
            yield {name: other}


def others(name: str, value: Any) -> Iterator[Any]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int) and 0 < value <= MOST_COUNT:
        yield from (value + 1, 2 * value)
    elif isinstance(value, float):
        yield 1.5 * value if value else 0.3
    elif isinstance(value, str) and "act" in name:
        yield from (other for other in ACTIVATIONS if other != value)
    elif value is None and name in GIVEN:
        yield GIVEN[name]
    elif isinstance(value, list) and name.endswith("_types") and len(set(map(str, value))) > 1:
        yield from (value[::-1], [value[0]] * len(value), [value[-1]] * len(value))
    elif isinstance(value, dict) and name == "rope_parameters" and value:
        by_kind = {kind for kind, inner in value.items() if isinstance(inner, dict)}
        for rope in ROPES:
            if not by_kind:
                yield {**value, **rope}
            yield from ({**value, kind: {**value[kind], **rope}} for kind in by_kind)


def difference(architecture: str, where: Path, changes: dict[str, Any]) -> float | None:
    """Of our logprobs to transformers'; None where either refuses the config."""
    wanted = None
    with suppress(Exception), torch.no_grad():  # whatever transformers thinks of it
        model = sweep.write(architecture, where, 0, changes)
        sequences = sweep.texts(model.config)
        wanted = [model(torch.tensor([s])).logits[0].log_softmax(-1) for s in sequences]
    if wanted is None or not all(one.isfinite().all() for one in wanted):
        return None
    with suppress(RolloutError):
        config = ModelConfig.from_directory(where)
        got = sweep.run(sweep.load(config, where), sequences)
        pairs = zip(got, wanted, strict=True)
        return max(float((a.log_softmax(-1) - b[:, : a.shape[1]]).abs().max()) for a, b in pairs)
    return None


def wrong(kind: str, architecture: str, path: Path) -> list[str]:
    """The changes of a tiny model of that type that it is served with, and not as it should be."""
    for base in sweep.VARIANTS:
        if (apart := difference(architecture, path / "base", base)) is not None:
            break
    else:
        return []
    assert apart < 1e-4, f"{kind} as it is: {apart}"
    values = getattr(transformers, architecture).config_class.from_pretrained(path / "base")
    found = []
    for number, changes in enumerate(variants(values.get_text_config().to_dict())):
        apart = difference(architecture, path / str(number), base | changes)
        if apart is not None and not apart < 1e-4:
            found.append(f"{kind} with {changes}: {apart:.2g}")
    return found


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_field_of_every_native_model_is_followed_or_refused(tmp_path: Path) -> None:
    types = native_types()
    assert len(types) > 40
    assert [line for kind, arch in types for line in wrong(kind, arch, tmp_path / kind)] == []


@pytest.mark.more
@pytest.mark.parametrize("kind", ["deepseek_v3", "gemma3_text", "qwen3_5"])
def test_every_field_of_some_models_is_followed_or_refused(kind: str, tmp_path: Path) -> None:
    assert wrong(kind, dict(native_types())[kind], tmp_path) == []


# Without these the tensors of a checkpoint do not fit, which its load says.
SHAPES = ("head_dim", "num_key_value_heads", "q_lora_rank")


def told(architecture: str, values: dict[str, Any], path: Path) -> ModelConfig | None:
    """What is read of a config.json as transformers reads it, defaults and all."""
    path.write_text(json.dumps(values))
    with suppress(Exception):  # whatever transformers thinks of it
        read = getattr(transformers, architecture).config_class.from_pretrained(path)
        whole = json.loads(read.to_json_string(use_diff=False))
        return ModelConfig.from_hf({**whole, "architectures": [architecture]})
    return None


def alike(theirs: ModelConfig, ours: ModelConfig) -> ModelConfig:
    """``theirs`` but for what changes nothing that a model computes."""
    return replace(theirs, dtype=ours.dtype, prefixes=ours.prefixes)


def left_out(architecture: str, path: Path) -> list[str]:
    """The fields that a tiny model's file may do without, and is then read as another model."""
    for base in sweep.VARIANTS:
        kind = getattr(transformers, architecture).config_class
        with suppress(Exception):
            made = kind(**sweep.tiny_settings(kind(), sweep.SIZES | base))
            values = json.loads(made.to_json_string(use_diff=False))
            values["architectures"] = [architecture]
            ModelConfig.from_hf(values)
            break
    else:
        return []
    found = []
    for name in [name for name in values if "token_id" not in name and name not in SHAPES]:
        for changed in ({k: v for k, v in values.items() if k != name}, {**values, name: None}):
            with suppress(ConfigError):
                ours = ModelConfig.from_hf(changed)
                theirs = told(architecture, changed, path)
                if theirs is not None and ours != alike(theirs, ours):
                    found.append(
                        f"{architecture}: {name} {'null' if name in changed else 'absent'}"
                    )
    return found


@pytest.mark.more
def test_a_field_that_a_file_leaves_out_is_what_transformers_takes_or_is_asked_for(
    tmp_path: Path,
) -> None:
    wrong = [line for _, arch in native_types() for line in left_out(arch, tmp_path / "c.json")]
    assert [line for line in wrong if "OlmoHybridForCausalLM: layer_types" not in line] == []


@pytest.mark.parametrize(
    ("arch", "name"),
    [
        ("cohere", "rope_parameters"),
        ("deepseek_v2", "topk_method"),
        ("deepseek_v3", "n_group"),
        ("gpt_oss", "rope_parameters"),
        ("llama4", "attention_chunk_size"),
        ("ministral3", "rope_parameters"),
    ],
)
def test_what_is_left_out_is_no_other_model(arch: str, name: str, tmp_path: Path) -> None:
    source = write_tiny(tmp_path, arch).config
    values = {**source.to_dict(), "architectures": [ARCHITECTURES[arch][1].__name__]}
    del values[name]
    theirs = told(values["architectures"][0], values, tmp_path / "c.json")
    if name in ("n_group", "rope_parameters") and arch != "cohere":
        with pytest.raises(ConfigError, match=f"field '{name}' is missing"):
            ModelConfig.from_hf(values)
    else:
        assert theirs is not None
        ours = ModelConfig.from_hf(values)
        assert ours == alike(theirs, ours)


def test_olmo_hybrid_turns_where_its_rope_parameters_are_null(tmp_path: Path) -> None:
    values = {**write_tiny(tmp_path, "olmo_hybrid").config.to_dict(), "rope_parameters": None}
    values["architectures"] = ["OlmoHybridForCausalLM"]
    theirs = told("OlmoHybridForCausalLM", values, tmp_path / "c.json")
    assert theirs is not None
    ours = ModelConfig.from_hf(values)
    assert ours == alike(theirs, ours)


@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("qwen2", {}),
        ("qwen2_moe", {}),
        ("qwen2_moe", {"max_window_layers": 2}),
        ("qwen3", {"max_window_layers": 1}),
        ("qwen3_moe", {"max_window_layers": 1}),
        ("smollm3", {"no_rope_layers": [1, 0, 0, 1]}),
    ],
)
def test_windows_are_in_the_layers_in_which_transformers_has_them_without_layer_types(
    arch: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    settings = {"num_hidden_layers": 4, "sliding_window": 7, "use_sliding_window": True}
    source = write_tiny(tmp_path, arch, **settings, **changes)
    values = {**json.loads((tmp_path / "config.json").read_text()), **changes}
    for name in {"layer_types", "max_window_layers"} - changes.keys():
        values.pop(name, None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config, [ids] = ModelConfig.from_directory(tmp_path), prompts(320, [40])
    [wanted] = reference(source, [ids])
    [got] = Session(loaded(config, TensorParallel(), source.state_dict()), [ids]).advance([40])
    assert (got - wanted).abs().max() < 1e-4


@pytest.mark.parametrize("value", [{"hidden_act": "gelu"}, {"mlp_bias": True}])
def test_experts_with_another_gate_or_biases_are_refused(
    value: dict[str, Any], tmp_path: Path
) -> None:
    sweep.write("DeepseekV2ForCausalLM", tmp_path, 0, value)
    with pytest.raises(ConfigError, match=rf"{next(iter(value))}.*does not go with experts"):
        ModelConfig.from_directory(tmp_path)


def test_biases_that_transformers_would_add_twice_are_refused(tmp_path: Path) -> None:
    sweep.write("FalconForCausalLM", tmp_path, 0, {"alibi": True})
    with pytest.raises(ConfigError, match=r"adds its biases \(alibi\) twice"):
        ModelConfig.from_directory(tmp_path)


@pytest.mark.parametrize(
    "architecture", ["Gemma3ForCausalLM", "LlamaForCausalLM", "GPTNeoXForCausalLM"]
)
def test_models_whose_tokens_see_later_ones_are_refused(architecture: str, tmp_path: Path) -> None:
    sweep.write(architecture, tmp_path, 0, {})
    for change in ({"use_bidirectional_attention": True}, {"is_causal": False}):
        with pytest.raises(ConfigError, match="see later ones"):
            ModelConfig.from_directory(tmp_path, overrides=change)
    assert ModelConfig.from_directory(tmp_path, overrides={"is_causal": True})
