"""LoRA of routed experts beside the weights, as PEFT's own model and the merged one have it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import shaken
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny
from transformers import AutoModelForCausalLM

from rollout import Rollout, SamplingParams
from rollout.errors import ConfigError, WeightMismatch

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys"),  # they are used
    pytest.mark.usefixtures("forked_ranks"),
]

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "both": {"r": 4, "lora_alpha": 6, "target_parameters": BOTH},
    "down": {
        "r": 2, "target_parameters": BOTH[1:], "target_modules": ["q_proj", "o_proj"],
        "use_rslora": True,
    },
    "patterns": {
        "r": 2, "target_parameters": BOTH, "rank_pattern": {"gate_up_proj": 3},
        "alpha_pattern": {"layers.1.mlp.experts.down_proj": 5},
    },
    "attention": {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    "linears": {  # of which PEFT makes target_parameters, of twice the rank for gate and up
        "r": 2, "lora_alpha": 3, "target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"],
    },
}  # fmt: skip
PROMPT = list(range(3, 40))
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
SETTINGS: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 8, "timeout": 30,
    "max_adapters": 8, "max_lora_rank": 4, "lora_experts": True,
}  # fmt: skip


def peft_model(base: Path, kind: str, seed: int = 0) -> PeftModel:
    settings = {"target_modules": [], **KINDS[kind]}
    model = AutoModelForCausalLM.from_pretrained(base)
    return shaken(get_peft_model(model, LoraConfig(**settings), kind), seed + len(kind)).eval()


def said(rollout: Rollout, names: list[str | None]) -> list[Any]:
    rollout.reset_prefix_cache()
    params = [SamplingParams(adapter=name, **GREEDY) for name in names]
    outputs = rollout.generate([PROMPT] * len(names), params)
    return [output.outputs[0] for output in outputs]


def check(completion: Any, model: Any, tolerance: float = 1e-4) -> None:
    tokens = [*PROMPT, *completion.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    wanted = torch.log_softmax(logits, -1)[len(PROMPT) - 1 : -1]
    got = torch.tensor(completion.logprobs.raw)
    if tolerance < 1e-3:
        assert wanted.argmax(-1).tolist() == completion.token_ids
    wanted = wanted.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def base_of(arch: str, path: Path) -> Path:
    write_tiny(path, arch)
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return base_of("qwen3_moe", tmp_path_factory.mktemp("base") / "checkpoint")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="tp1"),
        pytest.param({"tensor_parallel_size": 2}, id="tp2", marks=pytest.mark.more),
        pytest.param(
            {"tensor_parallel_size": 2, "expert_parallel": True},
            id="dealt out",
            marks=pytest.mark.more,
        ),
    ],
)
def engine(request, base) -> Iterator[Rollout]:
    with Rollout(base, **request.param, **SETTINGS) as rollout:
        yield rollout


def test_one_batch_answers_as_pefts_models_from_a_model_and_from_files(
    engine, base, tmp_path
) -> None:
    models = {kind: peft_model(base, kind) for kind in KINDS}
    for kind in ("patterns", "down"):
        models[kind].save_pretrained(tmp_path)
    sent = engine.update_weights(adapters={k: models[k] for k in ("both", "attention", "patterns")})
    assert sent.adapters["both"].num_tensors == 2 * 2 * 2
    engine.update_weights(adapters={"down": tmp_path / "down"})
    names = ["both", None, "down", "attention", "patterns", "both"]
    first = said(engine, names)
    for name, completion in zip(names, first, strict=True):
        check(completion, models[name] if name else AutoModelForCausalLM.from_pretrained(base))
    assert len({tuple(each.token_ids) for each in first}) >= 4
    read = engine.update_weights(adapters={"patterns": tmp_path / "patterns"})
    assert read.adapters["patterns"].digest == sent.adapters["patterns"].digest
    again = said(engine, names)
    assert [each.logprobs.raw for each in again] == [each.logprobs.raw for each in first]
    # Another version, and the one before again; then a slot that had experts in it.
    engine.update_weights(peft_model(base, "both", seed=5), adapters_only=True)
    check(said(engine, ["both"])[0], peft_model(base, "both", seed=5).merge_and_unload())
    engine.rollback()
    assert said(engine, names)[0].logprobs.raw == first[0].logprobs.raw
    engine.update_weights(adapters={"both": models["attention"]})
    check(said(engine, ["both"])[0], models["attention"])


def old_file(base: Path, folder: Path, alone: bool = False) -> PeftModel:
    """A directory as PEFT wrote it of transformers 4, a linear of each expert; and the model merged
    with it. ``alone``: some linears of some experts.
    """
    model = peft_model(base, "attention")
    model.save_pretrained(folder)
    settings = model.peft_config["attention"]
    scaling = settings.lora_alpha / settings.r
    path = folder / "attention" / "adapter_model.safetensors"
    tensors = load_file(path)
    merged = model.merge_and_unload()
    torch.manual_seed(4)
    for index, layer in enumerate(merged.model.layers):
        experts = layer.mlp.experts
        inner = experts.down_proj.shape[2]
        for expert in range(len(experts.down_proj)):
            for name, parameter in (
                ("gate_proj", experts.gate_up_proj.data[expert, :inner]),
                ("up_proj", experts.gate_up_proj.data[expert, inner:]),
                ("down_proj", experts.down_proj.data[expert]),
            ):
                if alone and (expert == 1 or name == "gate_proj"):
                    continue
                down = 0.2 * torch.randn(2, parameter.shape[1])
                up = 0.2 * torch.randn(len(parameter), 2)
                stem = f"base_model.model.model.layers.{index}.mlp.experts.{expert}.{name}"
                tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
                parameter += settings.lora_alpha / 2 * up @ down
    assert scaling != settings.lora_alpha / 2
    save_file(tensors, path)
    return merged


def test_files_with_a_linear_of_each_expert_are_stacked(engine, base, tmp_path) -> None:
    for alone in (False, True):
        merged = old_file(base, tmp_path / str(alone), alone)
        engine.load_lora_adapter("old", tmp_path / str(alone) / "attention")
        check(said(engine, ["old"])[0], merged)


def test_files_of_linears_that_peft_made_parameters_of_are_read(engine, base, tmp_path) -> None:
    """Of gate_proj and its like, whose stacks they are in transformers 5, in twice their rank."""
    model = peft_model(base, "linears")
    assert model.peft_config["linears"].target_parameters == {"gate_up_proj", "down_proj"}
    model.save_pretrained(tmp_path)
    sent = engine.update_weights(model, adapters_only=True)
    read = engine.update_weights(adapters={"linears": tmp_path / "linears"})
    assert read.adapters["linears"].digest == sent.adapters["linears"].digest
    check(said(engine, ["linears"])[0], model)


def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(engine, base, tmp_path) -> None:
    engine.update_weights(adapters={"kept": peft_model(base, "both")})
    before = said(engine, ["kept"])[0].logprobs.raw
    other = tmp_path / "other"
    write_tiny(other, "qwen3_moe", num_experts=4)
    with pytest.raises(WeightMismatch, match=r"experts\.gate_up_proj\.lora_A.* has shape"):
        engine.update_weights(adapters={"kept": peft_model(other, "both")})
    broken = peft_model(base, "both")
    with torch.no_grad():
        next(p for n, p in broken.named_parameters() if "experts.lora_B" in n)[0, -1] = torch.nan
    with pytest.raises(WeightMismatch, match="experts"):
        engine.update_weights(adapters={"kept": broken})
    models = peft_model(base, "both")
    models.save_pretrained(tmp_path)
    path = tmp_path / "both" / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({k: t[:-1] if "lora_A" in k else t for k, t in tensors.items()}, path)
    with pytest.raises(ConfigError, match=r"experts.*lora_A.weight and .* no factors of rank 4"):
        engine.load_lora_adapter("kept", path.parent)
    assert said(engine, ["kept"])[0].logprobs.raw == before


def test_without_room_for_experts_the_remedy_is_named(base, tmp_path) -> None:
    model = peft_model(base, "both")
    with (
        Rollout(base, **(SETTINGS | {"lora_experts": False})) as rollout,
        pytest.raises(ConfigError, match=r"experts\.(down|gate_up)_proj.*lora_experts=True"),
    ):
        rollout.update_weights(model, adapters_only=True)


@pytest.mark.more
@pytest.mark.parametrize("arch", ["mixtral", "qwen2_moe", "olmoe", "deepseek_v3", "granite_hybrid"])
def test_other_mixtures_answer_as_peft_does(arch, tmp_path) -> None:
    base = base_of(arch, tmp_path / "base")
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    model = AutoModelForCausalLM.from_pretrained(base)
    config = LoraConfig(r=3, target_modules=[], target_parameters=targets)
    model = shaken(get_peft_model(model, config), 2).eval()
    model.save_pretrained(tmp_path / "files")
    with Rollout(base, **SETTINGS) as rollout:
        rollout.update_weights(model, adapters_only=True)
        rollout.load_lora_adapter("files", tmp_path / "files")
        plain, sent, read = said(rollout, [None, "default", "files"])
    check(plain, AutoModelForCausalLM.from_pretrained(base))
    check(sent, model)
    check(read, model)
    assert plain.token_ids != sent.token_ids


@pytest.mark.more
@pytest.mark.parametrize(
    "more", [{"deterministic": True}, {"quantization": "int8"}, {"dtype": "bfloat16"}], ids=str
)
def test_other_ways_to_run_answer_beside_experts(base, more) -> None:
    model = peft_model(base, "both")
    with Rollout(base, **SETTINGS, **more) as rollout:
        rollout.update_weights(model, adapters_only=True)
        together = said(rollout, ["both", None, "both"])
        check(together[0], model, 1e-4 if "deterministic" in more else 0.25)
        if "deterministic" in more:
            assert said(rollout, ["both"])[0].logprobs.raw == together[0].logprobs.raw
