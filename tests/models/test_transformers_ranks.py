"""Transformers' own modules over several ranks, cut by transformers' plans and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers_sweep
from transformers import Starcoder2Config

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.errors import ConfigError, WeightMismatch
from rollout.models.build import build_tables
from rollout.models.config.model import ModelConfig
from rollout.models.weight_io.table import check_tables
from rollout.server.preflight import check

pytestmark = pytest.mark.usefixtures("forked_ranks")

ENGINE: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "num_kv_blocks": 32,
    "skip_tokenizer_init": True, "block_size": 4, "tensor_parallel_size": 2,
    "enable_prefix_caching": False,  # chunks of other lengths give other last bits
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
PROMPTS = [list(range(3, 22)), [7, 8, 9]]


def write(model_type: str, path: Path, seed: int, changes: dict[str, Any] | None = None) -> Any:
    architecture = dict(transformers_sweep.model_types())[model_type]
    return transformers_sweep.write(architecture, path, seed, changes or {})


def outcome(engine: Rollout) -> list[tuple[list[int], list[float]]]:
    found = [output.outputs[0] for output in engine.generate(PROMPTS, GREEDY)]
    return [(list(one.token_ids), list(one.logprobs.raw)) for one in found]


@pytest.mark.parametrize(
    "model_type",
    [
        pytest.param("starcoder2", id="biases of sums, an odd vocabulary, a tied head"),
        pytest.param("gpt2", id="rollout's plan, inputs before outputs"),
        pytest.param("gpt_neox", id="q, k and v in one tensor", marks=pytest.mark.more),
        pytest.param("ernie4_5_moe", id="stacked experts", marks=pytest.mark.more),
        pytest.param("lfm2_moe", id="experts beside whole states", marks=pytest.mark.more),
    ],
)
def test_two_ranks_generate_as_transformers_does_and_an_update_is_a_fresh_start(
    tmp_path: Path, model_type: str
) -> None:
    first, second = (write(model_type, tmp_path / name, seed) for seed, name in enumerate("ab"))
    with Rollout(str(tmp_path / "a"), **ENGINE) as engine:
        fresh, info = outcome(engine), engine.weight_info()
        check_outcome(first, fresh)
        assert len(engine.update_weights(second, timeout=60).ranks) == 2
        assert engine.check_weights(second).equal
        updated = outcome(engine)
        check_outcome(second, updated)
        torn = second.state_dict()
        del torn[next(name for name in torn if ".1." in name)]
        with pytest.raises(WeightMismatch, match="missing"):
            engine.update_weights(torn, timeout=60)
        assert outcome(engine) == updated
        with torch.no_grad():
            for theirs, ours in zip(first.parameters(), second.parameters(), strict=True):
                ours.copy_(theirs)
        receipt = engine.update_weights(second, encoding="delta", timeout=60)
        assert outcome(engine) == fresh
        assert receipt.num_tensors == len(info.tensors)
    with Rollout(str(tmp_path / "a"), **ENGINE | {"tensor_parallel_size": 1}) as alone:
        check_outcome(first, outcome(alone))
        assert alone.update_weights(second, timeout=60).digest == receipt.digest


def check_outcome(model: Any, found: list[tuple[list[int], list[float]]]) -> None:
    """Greedy tokens and their logprobs are those of ``model``."""
    for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *tokens]]), use_cache=False).logits
        rows = logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert tokens == rows.argmax(-1).tolist()
        theirs = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(logprobs), theirs, atol=1e-4)


def test_the_ranks_take_each_tensor_once_whatever_number_they_are(tmp_path: Path) -> None:
    write("hrm_text", tmp_path, 0)
    config = ModelConfig.from_directory(tmp_path)
    for size in (2, 4):
        tables = build_tables(config, size, torch.float32)
        check_tables(tables)
        cut = [table.params["model.L_module.layers.0.self_attn.q_proj.weight"] for table in tables]
        assert {spec.shape for spec in cut} == {(64 // size, 64)}
        assert config.cached_heads(size)[1] == 4 // size


@pytest.mark.parametrize(
    ("model_type", "ranks", "changes"),
    [
        pytest.param("starcoder2", 4, {}, id="copies of heads of keys"),
        pytest.param("arcee", 3, {"num_attention_heads": 6, "head_dim": 8}, id="three ranks"),
        pytest.param("opt", 2, {}, id="heads that are counted"),
        pytest.param("stablelm", 4, {}, id="copies of heads that are counted"),
        pytest.param("stablelm", 2, {"qk_layernorm": True}, id="a norm for each head"),
        pytest.param("gpt_bigcode", 2, {"multi_query": False}, id="heads of q, k and v"),
        pytest.param("falcon", 2, {"new_decoder_architecture": True}, id="groups of q, k and v"),
        pytest.param("bloom", 2, {}, id="biases by distance"),
    ],
)  # fmt: skip
def test_ranks_give_what_one_does_under_other_configs(
    tmp_path: Path, model_type: str, ranks: int, changes: dict[str, Any]
) -> None:
    if ranks == 3:
        changes |= {"num_key_value_heads": 3, "hidden_size": 48}
    write(model_type, tmp_path / "a", 0, changes)
    changed = write(model_type, tmp_path / "b", 1, changes)
    config = ModelConfig.from_directory(tmp_path / "a")
    sequences = transformers_sweep.texts(config)
    alone = [
        transformers_sweep.run(transformers_sweep.load(config, tmp_path / name), sequences)
        for name in "ab"
    ]
    both = alone[0], alone[1]
    files = tmp_path / "a"
    assert transformers_sweep.over_ranks(ranks, config, files, changed, sequences, both) == "equal"


def test_each_rank_has_a_part_of_whatever_a_plan_names(tmp_path: Path) -> None:
    """Also where names end in numbers, as fc1 and dense_h_to_4h do."""
    for model_type, cut in (("phi", "mlp.fc1"), ("gpt_neox", "mlp.dense_h_to_4h")):
        write(model_type, tmp_path / model_type, 0)
        config = ModelConfig.from_directory(tmp_path / model_type)
        whole, part = (build_tables(config, size, torch.float32)[0] for size in (1, 2))
        [name] = [each for each in part.params if each.endswith(f"layers.0.{cut}.weight")]
        rows, columns = whole.params[name].shape
        assert part.params[name].shape == (rows // 2, columns)


def test_what_no_plan_cuts_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(model_type: str, size: int, changes: dict[str, Any] | None = None) -> str:
        write(model_type, tmp_path / model_type, 0, changes)
        config = EngineConfig(
            model=str(tmp_path / model_type), **ENGINE | {"tensor_parallel_size": size}
        )
        with pytest.raises(ConfigError, match="runs as transformers' modules, and not on") as found:
            check(config)
        return str(found.value)

    assert "has a plan of how to cut it. Sizes that work, up to 8: 1" in refusal("mamba", 2)
    assert "4 heads of queries do not divide" in refusal("starcoder2", 3)
    assert refusal("starcoder2", 3).endswith("Sizes that work, up to 8: 1, 2, 4")
    grouped = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
    assert "3 heads of keys and values do not divide" in refusal("starcoder2", 2, grouped)
    three = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 48}
    assert "3 heads of queries do not divide" in refusal("starcoder2", 2, three)
    assert refusal("starcoder2", 2, three).endswith("Sizes that work, up to 8: 1, 3")
    plan = Starcoder2Config.base_model_tp_plan
    monkeypatch.setitem(plan, "layers.*.mlp.c_fc", "sideways")
    assert "model.layers.0.mlp.c_fc: its plan has the kind 'sideways'" in refusal("starcoder2", 2)
    monkeypatch.setitem(plan, "layers.*.mlp.c_fc", "colwise")
    monkeypatch.setitem(plan, "layers.*.input_layernorm", "rowwise")
    assert "input_layernorm: its plan says rowwise, and a LayerNorm" in refusal("starcoder2", 2)
