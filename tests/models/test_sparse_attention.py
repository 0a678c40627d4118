"""Latent attention to the tokens that an index chooses, behind the public face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import ARCHITECTURES, EXPERTS, write_tiny

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig
from rollout.server.preflight import check

ENGINE: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 40, "block_size": 4, "max_model_len": 96,
    "skip_tokenizer_init": True,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=0)
PROMPTS = [
    [(11 * i + 5 * k * i + k) % 300 for i in range(length)] for k, length in ((1, 50), (2, 7))
]


def test_chunks_decodes_and_found_prefixes_choose_what_transformers_does(tmp_path: Path) -> None:
    """Longer than what is attended to, in steps of 16 tokens; then an update of the index alone."""
    model = write_tiny(tmp_path, "deepseek_v32")
    with Rollout(str(tmp_path), max_num_batched_tokens=16, **ENGINE) as engine:
        first = agree(engine, model)
        found = engine.generate(PROMPTS, GREEDY)
        assert found[0].num_cached_tokens >= 40
        assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in first]
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if ".indexer." in name:
                    weight.copy_(torch.randn(weight.shape, generator=torch.manual_seed(len(name))))
        engine.update_weights(model, timeout=20)
        changed = agree(engine, model)
        pairs = zip(first, changed, strict=True)
        same = [a.outputs[0].logprobs.raw == b.outputs[0].logprobs.raw for a, b in pairs]
        assert same == [False, False], "both contexts outgrow what is attended to"


def agree(engine: Rollout, model: Any) -> list[Any]:
    """What the engine makes of ``PROMPTS``, whose logprobs are transformers' own."""
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        sample = output.outputs[0]
        ids = torch.tensor([[*prompt, *sample.token_ids]])
        with torch.no_grad():
            scores = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        wanted = scores.gather(1, torch.tensor(sample.token_ids)[:, None])[:, 0]
        assert (torch.tensor(sample.logprobs.raw) - wanted).abs().max() < 1e-4
    return list(outputs)


def test_keys_of_the_index_are_planned_with_the_latents(tmp_path: Path) -> None:
    def token_bytes(arch: str, **overrides: Any) -> int:
        write_tiny(tmp_path / arch, arch, **overrides)
        return check(EngineConfig(model=str(tmp_path / arch), **ENGINE)).kv_bytes_per_token

    plain = token_bytes("deepseek_v3", num_layers=3)
    assert token_bytes("deepseek_v32", num_layers=3) == plain + 3 * 18 * 4
    shared = {"indexer_types": ["full", "shared", "full"]}
    assert token_bytes("glm_moe_dsa", num_layers=3, **shared) == plain + 2 * 18 * 4


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index_topk_pattern": "FSSFS"},
        {"indexer_types": ["full", "shared", "full", "full", "shared"]},
        {"index_topk_freq": 2},
        {"index_topk_freq": 3, "index_skip_topk_offset": 1},
    ],
)
def test_layers_with_an_index_of_their_own_are_those_of_transformers(
    fields: dict[str, Any],
) -> None:
    theirs = ARCHITECTURES["glm_moe_dsa"][0](num_hidden_layers=5, **fields).indexer_types
    config = ModelConfig.from_hf(values("glm_moe_dsa", num_hidden_layers=5) | fields)
    assert config.indexed_layers == tuple(i for i, kind in enumerate(theirs) if kind == "full")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"indexer_types": ["full"]}, 'indexer_types must be "full" or "shared" for each of 2'),
        ({"index_topk_pattern": "FX"}, 'index_topk_pattern must be "full" or "shared" for each'),
        ({"indexer_types": ["shared", "full"]}, "the first layer has no index"),
        ({"index_topk": None}, "'index_topk' is missing"),
        ({"index_head_dim": 4}, "index_head_dim 4 is less than qk_rope_head_dim 6"),
        ({"q_lora_rank": None}, "'q_lora_rank' is missing"),
    ],
)
def test_an_index_that_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_hf(values("glm_moe_dsa") | fields)


def values(arch: str, **overrides: Any) -> dict[str, Any]:
    """A tiny config.json, which says nothing yet of the layers that have an index."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 320}
    found = ARCHITECTURES[arch][0](**{**EXPERTS[arch], **sizes, **overrides}).to_dict()
    del found["indexer_types"]
    return {**found, "architectures": ["GlmMoeDsaForCausalLM"]}
