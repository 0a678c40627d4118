"""Adapters as sources: the factors alone, by PEFT's own names, with what scales them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from peft import LoraConfig
from peft.tuners.lora.gptq import GPTQLoraLinear
from peft.utils.hotswap import hotswap_adapter, prepare_model_for_compiled_hotswap
from torch import Tensor
from weight_sync_source.jobs.lora import adapted, factors

from rollout.errors import ConfigError
from rollout.weight_sync.trainer.sources.adapters import AdapterPlan
from rollout.weight_sync.trainer.sources.known_adapters import KnownAdapters
from rollout.weight_sync.trainer.sources.update import detect_update, own_adapters
from rollout.weights.wanted import WantedWeights

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


def streamed(obj: Any, adapters: dict[str, Any]) -> dict[str, Tensor]:
    found = detect_update(obj, adapters)
    return dict(found.source(WantedWeights(dtype=torch.float32)))


def same(found: dict[str, Tensor], name: str, wanted: dict[str, Tensor]) -> bool:
    own = {k.partition(":")[2]: t for k, t in found.items() if k.startswith(f"adapter/{name}:")}
    return own.keys() == wanted.keys() and all(torch.equal(own[k], t) for k, t in wanted.items())


def test_a_models_adapters_go_by_their_names_and_scales() -> None:
    model = adapted(use_rslora=True, rank_pattern={"layers.1.down_proj": 3}, lora_alpha=6)
    model.add_adapter("other", LoraConfig(r=2, lora_alpha=8, target_modules=["up_proj"]))
    assert own_adapters(model) == {"default": model}
    found = streamed(None, {"math": model, "other": model})
    assert same(found, "math", factors(model))  # the active one
    assert same(found, "other", factors(model, "other"))
    assert len(found) == len(factors(model)) + len(factors(model, "other"))
    first, second = (
        part.spec({}).modules
        for _, part in detect_update(None, {"math": model, "other": model}).parts
    )
    assert first["model.layers.1.down_proj"].rank == 3
    assert first["model.layers.1.down_proj"].scaling == 6 / math.sqrt(3)
    assert first["model.layers.0.up_proj"].scaling == 6 / math.sqrt(4)
    assert second["model.layers.0.up_proj"].scaling == 4
    assert "model.layers.0.down_proj" not in second


def test_an_adapter_of_a_quantised_base_goes_alone_and_what_refuses_its_merge_says_so() -> None:
    """As QLoRA trains it; PEFT's layer is real, and asks nothing of the linear that it wraps."""
    model = adapted()
    layer = model.get_submodule("base_model.model.model.layers.0.up_proj")
    of_codes = GPTQLoraLinear(
        layer.base_layer, "default", model.peft_config["default"], r=4, lora_alpha=8
    )
    of_codes.load_state_dict(layer.state_dict(), strict=False)
    model.set_submodule("base_model.model.model.layers.0.up_proj", of_codes)
    assert same(streamed(None, {"math": model}), "math", factors(model))
    [(_, part)] = detect_update(None, {"math": model}).parts
    assert part.spec({}).modules["model.layers.0.up_proj"].scaling == 2
    with pytest.raises(
        ConfigError, match=r"layers\.0\.up_proj: GPTQLoraLinear .*quantised.*adapters_only=True"
    ):
        streamed(model, {})


def test_what_a_hot_swap_brings_goes_with_its_own_rank_and_scaling(tmp_path) -> None:
    known = KnownAdapters()

    def spec() -> tuple[int, float]:
        [(_, part)] = detect_update(None, {"a": model}, known).parts
        tensors = part.source(WantedWeights(dtype=torch.float32))
        found = part.spec({}).modules["model.layers.0.up_proj"]
        assert dict(tensors)["model.layers.0.up_proj.lora_A.weight"].shape[0] == found.rank
        return found.rank, found.scaling

    model = adapted(lora_alpha=8)
    assert spec() == (4, 2)
    for rank in (2, 6):
        adapted(r=rank, lora_alpha=12).save_pretrained(tmp_path / str(rank))
    hotswap_adapter(model, tmp_path / "6", "default", torch_device="cpu")
    assert spec() == (6, 2)
    prepare_model_for_compiled_hotswap(model, target_rank=8)  # its scalings are tensors from now on
    assert spec() == (8, 2)
    hotswap_adapter(model, tmp_path / "2", "default", torch_device="cpu")
    assert spec() == (8, 6)


def test_a_directory_of_pefts_is_the_same_source(tmp_path) -> None:
    model = adapted(lora_alpha=6, alpha_pattern={"up_proj": 2})
    model.save_pretrained(tmp_path)
    assert same(streamed(None, {"a": tmp_path}), "a", factors(model))
    (_, files), (_, held) = detect_update(None, {"a": str(tmp_path), "b": model}).parts
    assert files.spec({}) == held.spec({})


def test_what_is_no_adapter_of_ours_is_refused_by_name(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"lm_head: .*modules_to_save.* merged"):
        streamed(None, {"a": adapted(modules_to_save=["lm_head"])})
    with pytest.raises(ConfigError, match=r"embed_tokens: what TrainableTokensWrapper trains"):
        streamed(None, {"a": adapted(trainable_token_indices={"embed_tokens": [1]})})
    model = adapted()
    for obj, adapters, match in (
        (None, {"a": {}}, "'a' is a dict; pass a PEFT model"),
        (None, {"a": tmp_path / "none"}, "none'; pass a PEFT model"),
        (None, {"a:b": model}, "'a:b' cannot name an adapter"),
        (None, {"a": tmp_path}, "adapter_config.json"),
        (None, [model], "adapters must map names"),
    ):
        with pytest.raises(ConfigError, match=match):
            streamed(obj, adapters)
    with pytest.raises(ConfigError, match="adapters_only=True takes a PEFT model"):
        own_adapters(torch.nn.Linear(2, 2))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"norm\.weight: trained beside the adapter.*the base"):
        streamed(None, {"a": model})
    model.add_adapter("other", LoraConfig(r=2, target_modules=["up_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match="default, other, of which 2 are active"):
        streamed(None, {"a": model})


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_an_adapter_that_began_by_changing_the_base_goes_with_the_base(start: str) -> None:
    model, known = adapted(init_lora_weights=start), KnownAdapters()
    for _ in range(2):
        [(_, part)] = detect_update(None, {"math": model}, known).parts
        with pytest.raises(ConfigError, match=rf"'{start}'\); send the base, too"):
            part.spec({})
    assert streamed(model, {"math": model})
    model.peft_config["default"].init_lora_weights = True  # the engine has it by now
    [(_, part)] = detect_update(None, {"math": model}, known).parts
    assert part.spec({}).rank == 4


def test_a_merged_adapter_is_no_base_to_send_beside_it() -> None:
    model = adapted()
    model.merge_adapter()
    with pytest.raises(ConfigError, match="unmerge_adapter"):
        streamed(model, {"a": model})


def test_a_plan_serves_again_until_something_of_its_layers_changes() -> None:
    model, known = adapted(), KnownAdapters()

    def plan() -> AdapterPlan:
        [(_, part)] = detect_update(None, {"math": model}, known).parts
        part.spec({})
        [(_, found)] = part.plans
        return found

    layer = model.get_submodule("base_model.model.model.layers.0.up_proj")
    first = plan()
    assert plan() is first
    layers = model.get_submodule("base_model.model.model.layers")
    layers._modules["5"] = layers._modules.pop("1")
    assert "model.layers.5.up_proj" in plan().spec.modules
    layers._modules["1"] = layers._modules.pop("5")
    layer.scaling["default"] *= 2
    second = plan()
    assert second is not first
    assert plan() is second
    assert second.spec.modules["model.layers.0.up_proj"].scaling == layer.scaling["default"]
    layer.lora_A["default"].weight = torch.nn.Parameter(layer.lora_A["default"].weight.double())
    assert torch.float64 in {factor.dtype for factor in plan().factors.values()}
    model.delete_adapter("default")
    model.add_adapter("default", LoraConfig(r=3, target_modules=["up_proj"]))
    model.set_adapter("default")
    assert plan().spec.rank == 3
    model.get_submodule("base_model.model.model.embed_tokens").weight.requires_grad_(True)
    with pytest.raises(ConfigError, match=r"embed_tokens.*trained beside"):
        plan()
