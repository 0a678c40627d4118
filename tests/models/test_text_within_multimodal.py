"""The text models of multimodal checkpoints: started and updated as they are published."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from adapted_models import shaken
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny

from rollout import Rollout, SamplingParams
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError, WeightMismatch
from rollout.loader import open_checkpoint
from rollout.models.build import build_model, build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import check_tables

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
MISTRAL = {"model_type": "mistral", "sliding_window": 7}
PIXTRAL = {"model_type": "pixtral", "head_dim": 8}
LLAMA4 = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
KINDS = {
    "gemma3": ("Gemma3", {"sliding_window": 7}, {}, {"mm_tokens_per_image": 4}),
    "mistral3": ("Mistral3", MISTRAL, PIXTRAL, {"tie_word_embeddings": False}),
    "llama4": ("Llama4", {"intermediate_size_mlp": 40, "num_local_experts": 2}, LLAMA4, {}),
}


def multimodal(kind: str, path=None, seed: int = 0):
    """transformers' own model with a vision tower, tiny; also written to ``path``."""
    stem, text, vision, more = KINDS[kind]
    config = getattr(transformers, f"{stem}Config")(
        text_config={**TEXT, **text}, vision_config={**VISION, **vision}, **more
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    if path is not None:
        model.save_pretrained(path)
    return model


def logprobs(model, ids):
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    return logits.float().log_softmax(-1)[torch.arange(len(ids) - 1), ids[1:]]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_of_a_multimodal_checkpoint_is_served_and_updated(tmp_path, kind):
    first = multimodal(kind, tmp_path)
    second = multimodal(kind, seed=1)
    ids = [5, 9, 2, 71, 33, 8, 60, 4, 17, 90, 3]
    asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
    with Rollout(str(tmp_path), device="cpu", dtype="float32", load_format="auto") as engine:

        def served():
            (output,) = engine.generate([ids], asked)
            rows = zip(output.prompt_logprobs[1:], ids[1:], strict=True)
            return torch.tensor([row[token] for row, token in rows])

        torch.testing.assert_close(served(), logprobs(first, ids), atol=1e-4, rtol=0)
        assert not engine.check_weights(first).differing
        engine.update_weights(second)  # names of the modules, tower and all
        torch.testing.assert_close(served(), logprobs(second, ids), atol=1e-4, rtol=0)
        assert not engine.preflight(str(tmp_path)).problems
        engine.update_weights(str(tmp_path))  # names of the files
        assert not engine.check_weights(first).differing
        stream = ((name, tensor) for name, tensor in second.state_dict().items())
        engine.update_weights(stream)
        assert not engine.check_weights(second).differing
        with pytest.raises(WeightMismatch, match=r"model\.layer\.0"):
            engine.update_weights({**first.state_dict(), "model.layer.0": torch.ones(1)})


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("kind", KINDS)
def test_a_peft_model_around_it_is_sent_merged(tmp_path, kind):
    """What its adapters change of a tower is passed over, as the tower is."""
    model = multimodal(kind, tmp_path)
    config = LoraConfig(r=2, target_modules=["q_proj", "o_proj", "fc1"])
    model = shaken(get_peft_model(model, config), 1).eval()
    with Rollout(str(tmp_path), device="cpu", dtype="float32") as engine:
        engine.update_weights(model)
        assert engine.check_weights(model).equal
        assert not engine.check_weights(model.merge_and_unload()).differing


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")
@pytest.mark.parametrize("kind", [*KINDS, "nemotron_h"])  # whose files say "backbone."
def test_a_directory_of_peft_is_merged_under_the_names_that_files_have(tmp_path, kind):
    base = tmp_path / "base"
    model = multimodal(kind, base) if kind in KINDS else write_tiny(base, kind)
    names = [n for n, _ in model.named_modules() if n.endswith("self_attn.q_proj")]
    names = [n for n in names if "vision" not in n] or ["q_proj"]
    model = shaken(get_peft_model(model, LoraConfig(r=2, target_modules=names)), 1).eval()
    model.save_pretrained(tmp_path / "adapter")
    with Rollout(str(base), device="cpu", dtype="float32") as engine:
        engine.load_lora_adapter("math", tmp_path / "adapter")
        assert engine.check_weights(model).equal
        engine.unload_lora_adapter("math")
        assert engine.check_weights(str(base)).equal
        for file in (tmp_path / "adapter").glob("*.safetensors"):
            held = {re.sub(r"layers\.\d", "layers.9", n): t for n, t in load_file(file).items()}
            save_file(held, file)
        with pytest.raises(ConfigError, match=r"layers\.9\..* which is no weight of this model"):
            engine.load_lora_adapter("math", tmp_path / "adapter")


def test_every_rank_takes_its_part_of_a_nested_text_model(tmp_path):
    multimodal("gemma3", tmp_path)
    config = ModelConfig.from_directory(tmp_path)
    check_tables(build_tables(config, 2))
    for rank in range(2):
        model = build_model(config, TensorParallel(rank, 2), torch.float32, "cpu")
        with open_checkpoint(str(tmp_path)) as checkpoint:
            report = model.load_weights(checkpoint.items())
        assert all(name.startswith("model.") for name in report.loaded)


def test_a_released_config_without_its_defaults_is_read(tmp_path):
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34}
    values = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "text_config": {**text, "intermediate_size": 10240, "sliding_window": 1024},
        "torch_dtype": "bfloat16",
        "vision_config": {},
    }
    config = ModelConfig.from_hf(values)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.vocab_size, config.tied, config.dtype) == (262208, True, torch.bfloat16)
    assert config.eos_token_ids == (1, 106)
    assert [layer.window for layer in config.layers[:6]] == [1024] * 5 + [0]
    values["text_config"] = {"model_type": "spiral"}
    with pytest.raises(ConfigError, match="model_type 'spiral' is not one of gemma3_"):
        ModelConfig.from_hf(values)
    with pytest.raises(ConfigError, match="'text_config' is missing"):
        ModelConfig.from_hf({**values, "text_config": None})


def test_a_release_with_layers_that_predict_further_updates_as_it_starts(tmp_path):
    write_tiny(tmp_path, "glm4_moe")
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    last = {name: tensor for name, tensor in weights.items() if "layers.1." in name}
    further = {name.replace("layers.1.", "layers.2."): t + 1 for name, t in last.items()}
    further["model.layers.2.eh_proj.weight"] = torch.ones(2, 2)
    save_file(weights | further, file)
    values = json.loads((tmp_path / "config.json").read_text())
    values |= {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(values))
    with Rollout(str(tmp_path), device="cpu", dtype="float32") as engine:
        engine.update_weights({name: tensor * 2 for name, tensor in weights.items()})
        assert engine.check_weights(weights).differing
        assert not engine.preflight(str(tmp_path)).problems
        engine.update_weights(str(tmp_path))
        assert not engine.check_weights(str(tmp_path)).differing
        assert not engine.check_weights(weights).differing
