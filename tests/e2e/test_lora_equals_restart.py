"""THE property for adapters: a live update from a PEFT model equals a start from the merged one."""

from __future__ import annotations

from typing import Any

import pytest
from adapted_models import adapted
from peft import LoraConfig
from start_engines import fill_prefix_cache, outcome, start

from rollout.errors import ConfigError

# PEFT asks transformers for it.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")


@pytest.fixture(scope="module")
def lora_fresh(engine, checkpoints, tmp_path_factory) -> Any:
    path = tmp_path_factory.mktemp("merged") / "checkpoint"
    adapted(checkpoints["a"], 7).merge_and_unload().save_pretrained(path)
    with start(path, engine.weight_info().tensor_parallel_size) as rollout:
        return path, outcome(rollout)


def test_a_live_update_equals_a_start_from_the_merged_checkpoint(
    engine, checkpoints, fresh, lora_fresh
) -> None:
    path, said = lora_fresh
    assert said != fresh["a"]
    for partial in (False, True):
        engine.update_weights(checkpoints["a"])
        fill_prefix_cache(engine)
        model = adapted(checkpoints["a"], 7)
        receipt = engine.update_weights(model, partial=partial)
        assert outcome(engine) == said
        assert receipt.details["merged_adapters"] == "default"
        assert receipt.num_tensors == (6 if partial else engine.preflight(model).num_tensors)
        assert engine.check_weights(model).equal
        assert engine.check_weights(path).equal


def test_an_adapter_that_cannot_be_merged_changes_nothing(engine, checkpoints) -> None:
    before, model = engine.weight_version, adapted(checkpoints["a"], 7, use_dora=True)
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.q_proj: DoRA"):
        engine.update_weights(model)
    assert engine.weight_version == before
    model.set_adapter("default")
    engine.update_weights(model)
    assert engine.check_weights(model.merge_and_unload()).equal
