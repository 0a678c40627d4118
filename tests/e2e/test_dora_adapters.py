"""DoRA beside the weights: what PEFT's own model says, whatever base lies below it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import shaken
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import write_tiny
from transformers import AutoModelForCausalLM

from rollout import Rollout, SamplingParams
from rollout.loader.peft_adapter import PeftAdapter

pytestmark = [
    pytest.mark.usefixtures("forked_ranks"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed"),
    pytest.mark.filterwarnings("ignore:Adapter 'biased'.* invalid shape"),  # a bias has one
]

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "every": {"r": 4, "lora_alpha": 8, "use_dora": True, "target_modules": EVERY},
    "some": {
        "r": 3, "lora_alpha": 5, "use_dora": True, "use_rslora": True,
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj"],
    },
    "biased": {
        "r": 2, "lora_alpha": 3, "lora_bias": True,
        "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
    },
    "plain": {"r": 4, "target_modules": ["q_proj", "o_proj", "down_proj"]},
}  # fmt: skip
PROMPT = list(range(3, 40))
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 8, "timeout": 30,
    "max_adapters": 6, "max_lora_rank": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """With biases of queries, keys and values, which have no part in a norm."""
    path = tmp_path_factory.mktemp("base") / "checkpoint"
    write_tiny(path, "qwen2")
    return path


def peft_model(base: Path, kind: str, seed: int, grown: float = 1.0) -> PeftModel:
    """``grown``: of another base, whose weights are this many times as large, here and there."""
    model = AutoModelForCausalLM.from_pretrained(base)
    with torch.no_grad():
        if grown != 1.0:
            for name, parameter in model.named_parameters():
                if "proj.weight" in name:
                    parameter *= torch.linspace(1.0, grown, parameter.shape[1])
    return shaken(get_peft_model(model, LoraConfig(**KINDS[kind]), kind), seed).eval()


@pytest.fixture(
    scope="module", params=[1, pytest.param(2, marks=pytest.mark.more)], ids=["tp1", "tp2"]
)
def engine(request, base) -> Iterator[Rollout]:
    with Rollout(base, tensor_parallel_size=request.param, **SETTINGS) as rollout:
        yield rollout


def said(rollout: Rollout, names: list[str | None]) -> list[Any]:
    rollout.reset_prefix_cache()
    params = [SamplingParams(adapter=name, **GREEDY) for name in names]
    outputs = rollout.generate([PROMPT] * len(names), params)
    return [output.outputs[0] for output in outputs]


def check(completion: Any, model: Any) -> None:
    """Greedy tokens and their logprobs are those of transformers' model."""
    tokens = [*PROMPT, *completion.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    wanted = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    assert wanted.argmax(-1).tolist() == completion.token_ids
    got = torch.tensor(completion.logprobs.raw)
    torch.testing.assert_close(got, wanted.max(-1).values, rtol=1e-4, atol=1e-4)


def test_one_batch_of_dora_and_lora_follows_its_base_through_updates_and_back(
    engine, base, tmp_path
) -> None:
    models = {kind: peft_model(base, kind, seed) for seed, kind in enumerate(KINDS)}
    for kind in ("some", "biased"):
        models[kind].save_pretrained(tmp_path)
    sent = engine.update_weights(adapters={k: models[k] for k in ("every", "plain")})
    engine.update_weights(adapters={kind: tmp_path / kind for kind in ("some", "biased")})
    names = ["every", None, "some", "plain", "every", "some", "biased"]
    first = said(engine, names)
    for name, completion in zip(names, first, strict=True):
        check(completion, models[name] if name else AutoModelForCausalLM.from_pretrained(base))
    assert len({tuple(each.token_ids) for each in first}) == 5
    assert sent.adapters["every"].num_tensors == 2 * 7 * 3
    # Other weights below them: the norms are those of these.
    others = {kind: peft_model(base, kind, seed, 1.5) for seed, kind in enumerate(KINDS)}
    with torch.no_grad():
        for kind, model in others.items():
            mine = dict(models[kind].named_parameters())
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(mine[name])
    biased = engine.update_weights(adapters={"biased": models["biased"]}).adapters["biased"]
    assert biased.num_tensors == 2 * 5 * 3
    engine.update_weights(peft_model(base, "plain", 2, 1.5).unload())
    second = said(engine, names)
    for name, completion in zip(names, second, strict=True):
        if name:
            check(completion, others[name])
    assert second[0].logprobs.raw != first[0].logprobs.raw
    engine.rollback()
    again = said(engine, names)
    assert [each.logprobs.raw for each in again] == [each.logprobs.raw for each in first]
    # Both at one commit; and one that replaces DoRA's slot leaves nothing of it.
    engine.update_weights(others["every"], adapters={"every": others["every"]})
    check(said(engine, ["every"])[0], others["every"].merge_and_unload())
    engine.update_weights(adapters={"every": models["biased"]})
    check(said(engine, ["every"])[0], others["biased"])
    engine.update_weights(models["plain"], adapters={"every": models["plain"]})
    check(said(engine, ["every"])[0], models["plain"])
    check(said(engine, ["some"])[0], models["some"].merge_and_unload())


def test_a_start_with_the_directory_is_the_update_bit_for_bit(base, tmp_path) -> None:
    model = peft_model(base, "every", 7)
    model.save_pretrained(tmp_path)
    files, merged = PeftAdapter.read(tmp_path / "every"), AutoModelForCausalLM.from_pretrained(base)
    wanted = peft_model(base, "every", 7).merge_and_unload().state_dict()
    for name, weight in merged.state_dict().items():  # without slots a directory is merged
        assert torch.equal(files.merged(name, weight), wanted[name]), name
    with Rollout(base, **SETTINGS) as rollout, Rollout(base, **SETTINGS) as fresh:
        sent = rollout.update_weights(adapters={"a": model})
        fresh.load_lora_adapter("a", tmp_path / "every")
        assert said(fresh, ["a"])[0].logprobs.raw == said(rollout, ["a"])[0].logprobs.raw
        assert fresh.receipts()[0].adapters["a"].digest == sent.adapters["a"].digest


@pytest.mark.more
@pytest.mark.parametrize(
    "more",
    [{"deterministic": True}, {"staging": "none"}, {"staging": "host"}, {"undo": "sparse"}],
    ids=str,
)
def test_every_way_to_change_the_base_changes_the_norms(base, more) -> None:
    model, grown = peft_model(base, "every", 8), peft_model(base, "every", 8, 1.5)
    with torch.no_grad():
        mine = dict(model.named_parameters())
        for name, parameter in grown.named_parameters():
            if "lora_" in name:
                parameter.copy_(mine[name])
    with Rollout(base, tensor_parallel_size=2, **SETTINGS, **more) as rollout:
        rollout.update_weights(adapters={"a": model})
        first = said(rollout, ["a"])[0]
        check(first, model)
        with grown.disable_adapter():
            rollout.update_weights(grown)
        check(said(rollout, ["a"])[0], grown)
        if "staging" not in more or more["staging"] == "host":
            rollout.rollback()
            assert said(rollout, ["a"])[0].logprobs.raw == first.logprobs.raw


@pytest.mark.more
def test_quantised_and_bfloat16_weights_have_norms_of_their_own(base) -> None:
    model = peft_model(base, "every", 9)
    merged = model.merge_and_unload()
    model = peft_model(base, "every", 9)
    for more in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        with Rollout(base, **SETTINGS, **more) as rollout:
            rollout.update_weights(adapters={"a": model})
            plain, adapted = said(rollout, [None, "a"])
            assert plain.token_ids != adapted.token_ids
            tokens = [*PROMPT, *adapted.token_ids]
            with torch.no_grad():
                logits = merged(torch.tensor([tokens])).logits[0].float()
            wanted = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
            wanted = wanted.gather(1, torch.tensor(adapted.token_ids)[:, None])[:, 0]
            got = torch.tensor(adapted.logprobs.raw)
            torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.25)
