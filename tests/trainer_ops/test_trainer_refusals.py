"""trainer_ops: what cannot have the engine's bits is refused by name, with what to do instead."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import write_tiny
from torch import nn

from rollout.errors import ConfigError, InvalidRequest
from rollout.trainer_ops import logprobs_of, patch, token_logprobs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return write_tiny(tmp_path_factory.mktemp("llama"), "llama")


@pytest.mark.parametrize("arch", ["deepseek_v3", "bamba", "phimoe", "ministral3"])
def test_other_blocks_are_refused_by_name(arch: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path, arch)
    with pytest.raises(ConfigError, match=rf"{type(model).__name__} cannot run .*Train it as it"):
        patch(model)


def test_what_is_no_causal_model_on_a_cpu_is_refused(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a Linear: patch the model itself"):
        patch(nn.Linear(2, 2))
    with torch.device("meta"):
        elsewhere = type(tiny)(tiny.config)
    with pytest.raises(ConfigError, match=r"parameters on meta: the ops .* CPU alone"):
        patch(elsewhere)
    with pytest.raises(ConfigError, match="float16"):
        patch(tiny, dtype=torch.float16)


def _adapted(model: Any) -> None:
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(LoraConfig(target_modules=["o_proj"]), model)


def _dropping(model: Any) -> None:
    model.model.layers[0].mlp.drop = nn.Dropout(0.1)


def _longrope(model: Any) -> None:
    model.config.rope_parameters = {
        "rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4,
    }  # fmt: skip


def _gelu(model: Any) -> None:
    model.config.hidden_act = "gelu"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (_gelu, r"LlamaForCausalLM with hidden_act gelu: silu and the tanh"),
        (_adapted, r"layers.0.self_attn.o_proj.*merge adapters"),
        (_dropping, r"layers.0.mlp.drop drops 0.1"),
        (_longrope, r"dynamic depends on the engine's max_model_len"),
    ],
)
def test_what_a_model_has_beside_is_refused_and_it_stays_whole(
    change: Callable[[Any], None], what: str, tmp_path: Path
) -> None:
    model: Any = write_tiny(tmp_path, "llama")
    change(model)
    with pytest.raises(ConfigError, match=what):
        patch(model)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("arch", "settings", "what"),
    [
        ("granite", {"logits_scaling": 2.5}, r"logits_scaling 2\.5: .* powers of two"),
        ("mixtral", {"router_jitter_noise": 0.1}, r"router_jitter_noise 0\.1: set it to 0"),
    ],
)
def test_what_the_engine_computes_in_another_way_is_refused(
    arch: str, settings: dict[str, Any], what: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=what):
        patch(write_tiny(tmp_path, arch, **settings))


def test_a_second_patch_is_refused_and_removing_twice_is_harmless(tiny: Any) -> None:
    before = tiny.config._attn_implementation
    held = patch(tiny)
    with pytest.raises(ConfigError, match="patched already"):
        patch(tiny)
    held.remove()
    held.remove()
    assert tiny.config._attn_implementation == before
    assert not any("forward" in vars(module) for module in tiny.modules())


def test_a_call_that_is_none_of_whole_sequences_is_refused(tiny: Any) -> None:
    ids = torch.arange(8).view(2, 4)
    hole, cut = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]), torch.tensor([[3, 4, 5, 6]])
    calls: list[tuple[str, dict[str, Any]]] = [
        ("token 2 of sample 0.*padding inside", {"attention_mask": hole}),
        ("token 0 of sample 0, at position 3", {"position_ids": cut}),
        (r"attention_mask \[2, 1, 4, 4\]", {"attention_mask": torch.ones(2, 1, 4, 4)}),
        ("a sequence of 0 tokens", {"attention_mask": torch.zeros(2, 4)}),
        ("without a KV cache", {"past_key_values": object()}),
    ]
    with patch(tiny):
        for what, settings in calls:
            with pytest.raises(InvalidRequest, match=what):
                tiny(ids, **settings)
        with pytest.raises(InvalidRequest, match="513 tokens: 1 to 512"):
            tiny(torch.zeros(1, 513).long())
        with torch.autocast("cpu"), pytest.raises(InvalidRequest, match="autocast chooses"):
            tiny(ids)
        with pytest.raises(InvalidRequest, match=r"patched for torch\.float32"):
            token_logprobs(tiny.bfloat16(), ids)
        tiny.float()
        logits = tiny(ids).logits
        with pytest.raises(InvalidRequest, match="one row of logits"):
            logprobs_of(logits, ids[:, 1:])
        for wrong in (-100, tiny.config.vocab_size):
            with pytest.raises(InvalidRequest, match=f"id {wrong} is outside the vocabulary"):
                token_logprobs(tiny, ids.masked_fill(ids == 5, wrong))
            with pytest.raises(InvalidRequest, match=f"id {wrong} is outside the vocabulary"):
                logprobs_of(logits, ids.masked_fill(ids == 5, wrong))
    with pytest.raises(InvalidRequest, match=r"call it within `with patch\(model\)"):
        token_logprobs(tiny, ids)
