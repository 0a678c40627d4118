"""LoRA of the embedding and the head beside the weights, as PEFT's own model has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import shaken
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import write_tiny
from transformers import AutoModelForCausalLM

from rollout import Rollout, SamplingParams
from rollout.engine.worker import model_runner
from rollout.errors import ConfigError

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.filterwarnings("ignore:.*tie"),
    pytest.mark.usefixtures("forked_ranks"),
]

KINDS: dict[str, dict[str, Any]] = {
    "both": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "q_proj"]},
    "words": {"r": 2, "lora_alpha": 6, "target_modules": ["embed_tokens"]},
    "normed": {"r": 3, "use_dora": True, "target_modules": ["embed_tokens", "v_proj"]},
    "head": {"r": 3, "use_dora": True, "target_modules": ["lm_head"]},
}
PROMPT = list(range(3, 40))
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 8, "timeout": 30,
    "max_adapters": 6, "max_lora_rank": 4, "max_num_seqs": 8,
}  # fmt: skip


def peft_model(base: Path, kind: str, factor: float = 1.0) -> PeftModel:
    """``factor``: of another base, whose vocabulary's weights are this many times as large."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        weights = {model.lm_head.weight, model.model.embed_tokens.weight}
        for weight in weights:
            weight *= torch.linspace(1.0, factor, weight.shape[1])
    return shaken(get_peft_model(model, LoraConfig(**KINDS[kind]), kind), len(kind)).eval()


def said(rollout: Rollout, names: list[str | None], **more: Any) -> list[Any]:
    rollout.reset_prefix_cache()
    params = [SamplingParams(adapter=name, **GREEDY, **more) for name in names]
    return rollout.generate([PROMPT] * len(names), params)


def check(output: Any, model: Any) -> None:
    completion = output.outputs[0]
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *completion.token_ids]])).logits[0].float()
    wanted = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    assert wanted.argmax(-1).tolist() == completion.token_ids
    got = torch.tensor(completion.logprobs.raw)
    torch.testing.assert_close(got, wanted.max(-1).values, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("tied", "ranks"),
    [(False, 1), pytest.param(True, 1), pytest.param(False, 2, marks=pytest.mark.more)],
)
def test_one_batch_answers_as_pefts_models_over_each_base(
    tied, ranks, tmp_path, monkeypatch
) -> None:
    base = tmp_path / "base"
    write_tiny(base, "qwen3", tied=tied)
    models = {kind: peft_model(base, kind) for kind in KINDS}
    names = ["both", None, "head", "words", "both", "normed"]
    with Rollout(
        base, tensor_parallel_size=ranks, lora_embeddings=True, **SETTINGS
    ) as rollout:  # fmt: skip
        rollout.update_weights(adapters={kind: models[kind] for kind in ("both", "head")})
        for kind in ("words", "normed"):
            models[kind].save_pretrained(tmp_path / "files", save_embedding_layers=False)
            rollout.update_weights(adapters={kind: tmp_path / "files" / kind})
        first = said(rollout, names)
        for name, output in zip(names, first, strict=True):
            check(output, models[name] if name else AutoModelForCausalLM.from_pretrained(base))
        assert len({tuple(output.outputs[0].token_ids) for output in first}) == 5
        rollout.update_weights(peft_model(base, "words", 1.5).unload())
        for name, output in zip(names, said(rollout, names), strict=True):
            if name:
                other = peft_model(base, name, 1.5)
                mine = {n: p for n, p in models[name].state_dict().items() if "lora_" in n}
                other.load_state_dict(mine, strict=False)  # magnitudes, too
                check(output, other)
        rollout.rollback()
        again = said(rollout, names)
        raw = [[o.outputs[0].logprobs.raw for o in outputs] for outputs in (first, again)]
        assert raw[0] == raw[1]
        if ranks == 1:  # logits of a few rows at a time are of the same rows' adapters
            scored = said(rollout, names, prompt_logprobs=1)
            monkeypatch.setattr(model_runner, "_LOGITS", 1)
            cut = said(rollout, names, prompt_logprobs=1)
            for whole, parts in zip(scored, cut, strict=True):
                assert whole.outputs[0].token_ids == parts.outputs[0].token_ids
                assert str(whole.prompt_logprobs)[:200] == str(parts.prompt_logprobs)[:200]


def test_without_room_for_the_vocabulary_the_remedy_is_named(tmp_path) -> None:
    write_tiny(tmp_path, "qwen3")
    with (
        Rollout(tmp_path, **SETTINGS) as rollout,
        pytest.raises(ConfigError, match=r"changes lm_head.*lora_embeddings=True"),
    ):
        rollout.update_weights(adapters={"a": peft_model(tmp_path, "head")})
