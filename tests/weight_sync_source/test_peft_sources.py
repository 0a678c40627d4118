"""PEFT models in one process: what is sent is what ``merge_and_unload`` gives, weight by weight."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from adapted_models import shaken
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from tiny_models import write_tiny
from torch import Tensor, nn
from weight_sync_source.jobs.lora import adapted, merged
from weight_sync_source.jobs.tiny import ALIASES, Tiny

from rollout.errors import ConfigError, WeightMismatch
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weight_sync.trainer.sources.names import named_weights
from rollout.weights import TensorMeta
from rollout.weights.names import file_form
from rollout.weights.wanted import WantedWeights, by_name

BF16, FP32 = torch.bfloat16, torch.float32
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),  # PEFT asks transformers so
    pytest.mark.filterwarnings("ignore:All adapters are already merged"),
]


def streamed(
    obj: Any,
    dtype: torch.dtype = FP32,
    tensors: Sequence[TensorMeta] = (),
    *,
    partial: bool = False,
) -> dict[str, Tensor]:
    wanted = WantedWeights(dtype=dtype, tensors=by_name(tensors))
    source = detect(obj).source(wanted, partial=partial)
    found = {name: tensor.clone() for name, tensor in source}
    wanted = [TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in found.items()]
    assert list(source.metadata() or ()) == wanted
    return found


def assert_equal(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("wire", [FP32, BF16])
@pytest.mark.parametrize("base", [FP32, BF16])
def test_what_is_sent_is_the_merged_model_bit_for_bit(base: torch.dtype, wire: torch.dtype) -> None:
    model = adapted(dtype=base)
    before = bits(model)
    found = streamed(model, wire)
    assert_equal(found, merged(adapted(dtype=base), wire))
    name = "model.layers.0.up_proj.weight"
    assert not torch.equal(found[name], streamed(Tiny(tied=False).to(base), wire)[name])
    assert_equal(bits(model), before)


@pytest.mark.parametrize("settings", [{}, {"use_dora": True, "dtype": BF16}])
def test_an_autocast_of_the_caller_rounds_no_merge(settings: dict[str, Any]) -> None:
    with torch.autocast("cpu", dtype=BF16):
        found = streamed(adapted(**settings))
    assert_equal(found, merged(adapted(**settings)))


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["up_proj", "embed_tokens"]},
        {"target_modules": ["up_proj"], "modules_to_save": ["model.norm", "lm_head"]},
        {"target_modules": ["up_proj"], "lora_bias": True},
        {"target_modules": ["up_proj", "down_proj"], "bias": "lora_only", "use_rslora": True},
        {"target_modules": ["down_proj"], "rank_pattern": {"layers.1.down_proj": 3}},
        {"use_dora": True},
        {"use_dora": True, "use_rslora": True, "dtype": BF16},
    ],
    ids=["embedding", "modules_to_save", "lora_bias", "bias", "ranks", "dora", "dora_bf16"],
)
def test_every_kind_of_lora_is_merged_as_peft_does(settings: dict[str, Any]) -> None:
    assert_equal(streamed(adapted(**settings)), merged(adapted(**settings)))


def test_dora_beside_another_active_adapter_is_refused_and_goes_merged() -> None:
    model = adapted(use_dora=True)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match=r"up_proj: DoRA beside another.*merge_adapter\(\)"):
        streamed(model)
    model.set_adapter("default")
    assert_equal(streamed(model), merged(adapted(use_dora=True)))


def test_partial_sends_what_the_adapters_change_and_no_more() -> None:
    settings: dict[str, Any] = {"target_modules": ["down_proj"], "modules_to_save": ["lm_head"]}
    model = adapted(**settings)
    body = model.base_model.model.model
    body.layers[0].input_layernorm.weight.requires_grad_()
    whole = merged(adapted(**settings))
    names = [f"model.layers.{i}.down_proj.weight" for i in (0, 1)]
    names += ["lm_head.weight", "model.layers.0.input_layernorm.weight"]
    assert_equal(streamed(model, partial=True), {name: whole[name] for name in names})
    base = streamed(Tiny(tied=False))
    with model.disable_adapter():  # the engine has the adapter's own head by now
        assert_equal(streamed(model, partial=True), {name: base[name] for name in names})
    assert_equal(streamed(Tiny(tied=False), partial=True), streamed(Tiny(tied=False)))


def test_active_adapters_are_added_one_after_the_other_and_others_are_not() -> None:
    def two(active: list[str]) -> PeftModel:
        model = adapted()
        for name, seed in (("second", 1), ("third", 2)):
            model.add_adapter(name, LoraConfig(target_modules=["down_proj"], r=2))
            torch.manual_seed(seed)
            for weight_name, parameter in model.named_parameters():
                if f".{name}." in weight_name:
                    parameter.data.normal_()
        model.base_model.set_adapter(active)
        return model

    for active in (["third"], ["second", "default"], ["default", "third", "second"]):
        assert_equal(streamed(two(active)), merged(two(active)))


def test_adapters_that_are_disabled_or_merged_already_add_nothing() -> None:
    model = adapted()
    with model.disable_adapter():
        assert_equal(streamed(model), streamed(Tiny(tied=False)))
    model.merge_adapter()
    assert_equal(streamed(model), merged(adapted()))
    with model.disable_adapter(), pytest.raises(ConfigError, match=r"up_proj.*unmerge_adapter"):
        streamed(model)


def test_injected_adapters_have_the_same_names() -> None:
    wanted = merged(adapted())
    assert_equal(streamed(adapted().base_model), wanted)  # what inject_adapter_in_model leaves
    assert_equal(streamed(adapted().base_model.model), wanted)


def test_fused_experts_that_an_adapter_targets_are_merged_and_split(tmp_path: Any) -> None:
    base = write_tiny(tmp_path / "base", "qwen3_moe")
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(target_modules=["q_proj"], target_parameters=names, r=2)
    model = shaken(get_peft_model(base, config), 3)
    tensors = [
        TensorMeta(name, FP32, tuple(tensor.shape))
        for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items()
    ]
    found = streamed(model, tensors=tensors)
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert_equal(found, load_file(tmp_path / "merged" / "model.safetensors"))


@pytest.mark.parametrize(
    ("config", "where", "what"),
    [
        (LoraConfig(target_modules=["embed_tokens"], use_dora=True), "embed_tokens", "Dora"),
        (IA3Config(target_modules=["up_proj"], feedforward_modules=[]), r"layers\.0", "Linear"),
        (
            LoraConfig(target_modules=["up_proj"], trainable_token_indices={"embed_tokens": [1]}),
            "embed_tokens",
            "TrainableTokensLayer",
        ),
    ],
    ids=["dora", "ia3", "tokens"],
)
def test_what_cannot_be_added_names_its_layer_and_a_remedy_that_works(
    config: Any, where: str, what: str
) -> None:
    model = get_peft_model(Tiny(tied=False), config)
    with pytest.raises(ConfigError, match=rf"{where}.*{what}.*merge_adapter\(\)"):
        streamed(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.25)
    with model.disable_adapter():
        assert_equal(streamed(model), streamed(Tiny(tied=False)))
    model.merge_adapter()
    assert_equal(streamed(model), merged(model))


@pytest.mark.filterwarnings("ignore:`lora_bias=True` was passed")
def test_a_bias_without_one_to_merge_it_into_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"down_proj: lora_bias has no bias"):
        streamed(adapted(target_modules=["down_proj"], lora_bias=True))


def test_prompt_tuning_is_refused(tmp_path: Any) -> None:
    base = write_tiny(tmp_path / "base")
    model = get_peft_model(base, PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ConfigError, match=r"without adapted layers.*use LoRA"):
        streamed(model)


@pytest.mark.parametrize(
    "settings",
    [
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["lm_head"]},
        {"target_modules": ["up_proj"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["up_proj"], "modules_to_save": ["embed_tokens"]},
    ],
)
def test_a_tied_weight_that_is_adapted_in_one_place_is_refused(settings: dict[str, Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT's own, of the same
        model = get_peft_model(Tiny(tied=True), LoraConfig(**settings))
    with pytest.raises(ConfigError, match=r"(embed_tokens|lm_head).*tied to.*tie_word_embeddings"):
        streamed(model)


def test_a_stream_of_an_adapters_own_tensors_is_refused_with_the_remedy() -> None:
    assert file_form("base_model.model.a.q_proj.base_layer.weight") == "a.q_proj.weight"
    assert file_form("module.base_model.model.a.weight") == "a.weight"
    assert file_form("a.base_model.model.b") == "a.base_model.model.b"
    for stream in (dict(named_weights(adapted())), iter(named_weights(adapted()))):
        with pytest.raises(WeightMismatch, match=r"lora_A.*pass the PEFT model itself"):
            list(detect(stream).source(WantedWeights(dtype=FP32)))


@pytest.mark.more
def test_at_most_three_of_the_largest_tensor_are_held_beside_the_model() -> None:
    model = get_peft_model(
        Tiny(tied=False, hidden=64, vocab=64, layers=8), LoraConfig(target_modules="all-linear")
    )
    largest = 64 * 3 * 64

    def live() -> int:
        tensors = {}
        for obj in gc.get_objects():
            if issubclass(type(obj), Tensor) and obj.layout is torch.strided:
                tensors[obj.untyped_storage().data_ptr()] = obj.untyped_storage().nbytes()
        return sum(tensors.values())

    gc.collect()
    source = detect(model).source(WantedWeights(dtype=FP32))
    before, most, total = live(), 0, 0
    for _, tensor in source:
        most, total = max(most, live() - before), total + tensor.nbytes
    assert total > 20 * largest
    assert most <= 3 * 4 * largest


def test_an_exception_in_the_middle_leaves_the_base_untouched() -> None:
    model = adapted()
    before = bits(model)
    layer = model.get_submodule("base_model.model.model.layers.1.down_proj")
    layer.scaling["default"] = "no number"
    with pytest.raises(TypeError):
        streamed(model)
    items = iter(detect(adapted()).source(WantedWeights(dtype=FP32)))
    next(items)
    items.close()
    assert_equal(bits(model), before)


def test_a_rank_that_only_follows_merges_nothing() -> None:
    follower = Agreement(rank=1, ranks=(0, 1))
    source = detect(adapted()).source(WantedWeights(aliases=ALIASES, dtype=BF16), group=follower)
    found = [(n, t.device.type, t.dtype, tuple(t.shape)) for n, t in source]
    alone = detect(adapted()).source(WantedWeights(aliases=ALIASES, dtype=BF16))
    assert found == [(n, "meta", t.dtype, tuple(t.shape)) for n, t in alone]
