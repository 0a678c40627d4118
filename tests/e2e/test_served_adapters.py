"""Adapters beside the weights, several in one batch: what PEFT's own model says, and the merged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from adapted_models import shaken
from peft import LoraConfig, PeftModel, get_peft_model
from tiny_models import write_tiny
from transformers import AutoModelForCausalLM

from rollout import Rollout, SamplingParams
from rollout.errors import ConfigError, InvalidRequest, WeightMismatch
from rollout.loader.peft_adapter import PeftAdapter
from rollout.weights.files.safetensors_files import SafetensorsFiles

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`"),
    pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`"),
    pytest.mark.usefixtures("forked_ranks"),
]

EVERY = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
ADAPTERS: dict[str, dict[str, Any]] = {
    "every": {"r": 4, "lora_alpha": 8, "target_modules": EVERY},
    "stable": {"r": 3, "lora_alpha": 5, "use_rslora": True, "target_modules": ["q_proj", "o_proj"]},
    "patterns": {
        "r": 2,
        "lora_alpha": 4,
        "target_modules": ["v_proj", "gate_proj", "down_proj"],
        "rank_pattern": {"v_proj": 8},
        "alpha_pattern": {"layers.1.mlp.down_proj": 1},
    },
}
LAYERS = ["dense", "sparse", "sparse"]
PROMPT = list(range(3, 40))
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


def peft_model(base: Path, name: str, seed: int, **settings: Any) -> PeftModel:
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(**settings), name)
    return shaken(model, seed).eval()


def saved(base: Path, into: Path, seed: int, **settings: Any) -> Path:
    """A directory of PEFT's."""
    peft_model(base, "default", seed, **settings).save_pretrained(into)
    return into


def read(base: Path, folder: Path) -> PeftModel:
    """PEFT's own model of that directory."""
    return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), folder).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("base") / "checkpoint"
    write_tiny(path, "qwen3")
    return path


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory) -> dict[str, Path]:
    where = tmp_path_factory.mktemp("adapters")
    names = enumerate(ADAPTERS)
    return {name: saved(base, where / name, seed, **ADAPTERS[name]) for seed, name in names}


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.more)])
def engine(request, base, folders) -> Any:
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 8}
    with Rollout(
        base, tensor_parallel_size=request.param, max_adapters=4, max_lora_rank=8,
        weight_dirs=[str(folders["every"].parent)], **settings,
    ) as rollout:  # fmt: skip
        for name, folder in folders.items():
            rollout.load_lora_adapter(name, folder)
        yield rollout


def said(rollout: Rollout, adapters: list[str | None], prompt: list[int] = PROMPT) -> list[Any]:
    params = [SamplingParams(adapter=name, **GREEDY) for name in adapters]
    outputs = rollout.generate([prompt] * len(adapters), params)
    return [output.outputs[0] for output in outputs]


def logprobs(model: Any, tokens: list[int], start: int) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].float()
    return torch.log_softmax(logits, -1)[start - 1 : -1]


def check(completion: Any, model: Any) -> None:
    """Greedy tokens and their logprobs are those of transformers' model."""
    tokens = [*PROMPT, *completion.token_ids]
    wanted = logprobs(model, tokens, len(PROMPT))
    assert wanted.argmax(-1).tolist() == completion.token_ids
    got = torch.tensor(completion.logprobs.raw)
    torch.testing.assert_close(got, wanted.max(-1).values, rtol=1e-4, atol=1e-4)


def test_one_batch_answers_with_many_adapters_as_peft_and_merged_models_do(
    engine, base, folders
) -> None:
    names = [None, "every", "stable", None, "patterns", "every"]
    answers = dict(zip(names, said(engine, names), strict=True))
    check(answers[None], AutoModelForCausalLM.from_pretrained(base))
    assert len({tuple(each.token_ids) for each in answers.values()}) == 4
    assert engine.weight_info().memory["adapters"] > 0
    for name, folder in folders.items():
        peft = read(base, folder)
        check(answers[name], peft)
        check(answers[name], peft.merge_and_unload())


def test_a_prefix_is_found_again_only_under_the_same_adapter(engine) -> None:
    prompt = list(range(100, 132))
    engine.reset_prefix_cache()
    cached = []
    for name in (None, "every", "stable", "every", None):
        [output] = engine.generate([prompt], SamplingParams(adapter=name, **GREEDY))
        cached.append(output.num_cached_tokens)
    assert cached == [0, 0, 0, 24, 24]


def test_a_sequence_keeps_the_version_it_began_with(engine, base, folders, tmp_path) -> None:
    [before] = said(engine, ["every"])
    params = SamplingParams(adapter="every", temperature=0, max_tokens=60, ignore_eos=True)
    running = engine.stream(PROMPT, params)
    next(running)
    other = saved(base, tmp_path / "other", 9, **ADAPTERS["every"])
    first, second = (engine.load_lora_adapter("every", path) for path in (folders["every"], other))
    assert second.version > first.version
    *_, last = running
    assert last.outputs[0].token_ids[:6] == before.token_ids
    [after] = said(engine, ["every"])
    assert after.token_ids != before.token_ids
    check(
        after, PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), other).eval()
    )
    engine.load_lora_adapter("every", folders["every"])
    assert said(engine, ["every"])[0].token_ids == before.token_ids


def test_what_cannot_be_served_is_refused_by_name_and_changes_nothing(
    engine, base, folders, tmp_path
) -> None:
    before = [each.token_ids for each in said(engine, [None, "every"])]
    with pytest.raises(InvalidRequest, match=r"no adapter 'nobody'; loaded: every, stable"):
        said(engine, [None, "nobody"])
    every = ADAPTERS["every"]
    large = saved(base, tmp_path / "large", 0, **(every | {"r": 9}))
    with pytest.raises(ConfigError, match=r"rank 9, and .* up to 8: .*max_lora_rank=9"):
        engine.load_lora_adapter("new", large)
    settings = Path(saved(base, tmp_path / "odd", 0, **every)) / "adapter_config.json"
    plain = json.loads(settings.read_text())
    for odd, why in (
        ({"lora_alpha": float("nan")}, "scaling .* is nan"),
        ({"lora_alpha": 1e40}, r"scaling .* is 2\.5e\+39"),
        ({"alpha_pattern": {"(": 3}}, "alpha_pattern .* is not PEFT's"),
        ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern .* is not PEFT's"),
    ):
        settings.write_text(json.dumps(plain | odd))
        with pytest.raises(ConfigError, match=why):
            engine.load_lora_adapter("new", settings.parent)
    head = saved(base, tmp_path / "head", 0, r=2, target_modules=["embed_tokens"])
    with pytest.raises(ConfigError, match=r"embed_tokens\.base_layer.*save_embedding_layers=False"):
        engine.load_lora_adapter("new", head)
    write_tiny(tmp_path / "wide", "qwen3", hidden_size=96)
    wide = saved(tmp_path / "wide", tmp_path / "of_wide", 0, **every)
    with pytest.raises(WeightMismatch, match=r"gate_proj\.lora_A\.weight has shape \(4, 96\)"):
        engine.load_lora_adapter("new", wide)
    write_tiny(tmp_path / "long", "qwen3", num_layers=3)
    long = saved(tmp_path / "long", tmp_path / "of_long", 0, **every)
    with pytest.raises(WeightMismatch, match=r"model\.layers\.2\..*no linear layer here"):
        engine.load_lora_adapter("new", long)
    cut_off = Path(saved(base, tmp_path / "cut_off", 0, **every)) / "adapter_model.safetensors"
    whole = cut_off.stat().st_size
    os.truncate(cut_off, whole // 2)
    os.truncate(cut_off, whole)
    with cut_off.open("rb") as opened:
        tells = os.lseek(opened.fileno(), whole - 1, os.SEEK_HOLE) < whole
    if tells:  # the file system
        with pytest.raises(ConfigError, match="was never written to its end"):
            engine.load_lora_adapter("new", cut_off.parent)
    engine.load_lora_adapter("fourth", folders["every"])
    with pytest.raises(ConfigError, match=r"for fifth: 4 of 4 hold .*max_adapters=5"):
        engine.load_lora_adapter("fifth", folders["every"])
    assert engine.unload_lora_adapter("fourth")
    assert not engine.unload_lora_adapter("fourth")
    assert [each.token_ids for each in said(engine, [None, "every"])] == before


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_config.json"])
def test_an_adapter_that_is_written_while_it_is_read_is_refused(
    base, tmp_path, monkeypatch, name
) -> None:
    """A trainer saves over it, or copies it there: no mixture of two goes live."""
    path = Path(saved(base, tmp_path / "adapter", 0, **ADAPTERS["every"]))
    file, read = path / name, SafetensorsFiles.read
    os.utime(file, (0, 0))

    def reads(self, tensor, box):
        file.write_bytes(file.read_bytes())
        return read(self, tensor, box)

    PeftAdapter.read(path)
    monkeypatch.setattr(SafetensorsFiles, "read", reads)
    with pytest.raises(ConfigError, match=f"{file} was written while it was read"):
        PeftAdapter.read(path)


def test_deterministic_rows_have_the_same_bits_beside_any_adapters(base, folders) -> None:
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "block_size": 8}
    names = [None, "every", "patterns", None, "every", "stable"]
    with Rollout(
        base, deterministic=True, max_adapters=3, max_lora_rank=8, **settings
    ) as rollout:  # fmt: skip
        for name, folder in folders.items():
            rollout.load_lora_adapter(name, folder)
        together = said(rollout, names)
        for name, completion in zip(names, together, strict=True):
            rollout.reset_prefix_cache()
            [alone] = said(rollout, [name])
            assert alone.logprobs.raw == completion.logprobs.raw
            assert alone.token_ids == completion.token_ids


@pytest.mark.more
@pytest.mark.parametrize("arch", ["qwen2", "phi3", "olmo2", "mixtral"])
def test_other_architectures_answer_as_peft_does(arch, tmp_path) -> None:
    """Biases, fused linears, norms after the halves, attention of a mixture."""
    model = write_tiny(tmp_path / "base", arch)
    leaves = {name.rsplit(".", 1)[-1] for name, each in model.named_modules() if "_proj" in name}
    targets = sorted(leaf for leaf in leaves if leaf.endswith("_proj"))
    folder = saved(tmp_path / "base", tmp_path / "adapter", 1, r=4, target_modules=targets)
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64}
    with Rollout(tmp_path / "base", max_adapters=1, **settings) as rollout:
        rollout.load_lora_adapter("a", folder)
        plain, adapted = said(rollout, [None, "a"])
    check(plain, AutoModelForCausalLM.from_pretrained(tmp_path / "base"))
    check(adapted, read(tmp_path / "base", folder))


def test_linears_that_files_name_otherwise_than_modules_answer_as_pefts(tmp_path) -> None:
    """Kimi-Linear's gates, and what its files call block_sparse_moe: in slots, and merged."""
    base = tmp_path / "base"
    names = {n for n, _ in write_tiny(base, "kimi_linear", mlp_layer_types=LAYERS).named_modules()}
    leaves = (
        "forget_gate.f_a_proj",
        "forget_gate.f_b_proj",
        "shared_experts.up_proj",
        "0.mlp.down_proj",
    )
    targets = sorted(name for name in names if name.endswith(leaves))
    assert len(targets) > len(leaves)
    model = peft_model(base, "math", 1, r=4, target_modules=targets)
    model.save_pretrained(tmp_path / "files")
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64}
    with Rollout(base, max_adapters=3, **settings) as rollout:
        rollout.update_weights(model, adapters_only=True)
        rollout.load_lora_adapter("b", tmp_path / "files" / "math")
        plain, *adapted = said(rollout, [None, "math", "b"])
    check(plain, AutoModelForCausalLM.from_pretrained(base))
    for each in adapted:
        check(each, model)
    with Rollout(base, **settings) as rollout:
        rollout.load_lora_adapter("a", tmp_path / "files" / "math")
        check(said(rollout, [None])[0], model)
        assert rollout.check_weights(model).equal


@pytest.mark.more
def test_bfloat16_in_tiles_and_quantised_weights_answer_beside_adapters(base, folders) -> None:
    settings = {"device": "cpu", "num_threads": 1, "num_kv_blocks": 64, "max_adapters": 2}
    merged = read(base, folders["every"]).merge_and_unload()
    for more in ({"dtype": "bfloat16"}, {"quantization": "int8"}):
        with Rollout(base, max_lora_rank=8, **more, **settings) as rollout:
            rollout.load_lora_adapter("every", folders["every"])
            plain, adapted = said(rollout, [None, "every"])
            assert plain.token_ids != adapted.token_ids
            tokens = [*PROMPT, *adapted.token_ids]
            wanted = logprobs(merged, tokens, len(PROMPT))
            wanted = wanted.gather(1, torch.tensor(adapted.token_ids)[:, None])[:, 0]
            got = torch.tensor(adapted.logprobs.raw)
            torch.testing.assert_close(got, wanted, rtol=0.1, atol=0.25)
