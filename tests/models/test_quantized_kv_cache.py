"""Keys and values in 8 bits: as transformers computes with a cache that rounds alike; served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_threads import Session, loaded, prompts, run_ranks
from tiny_models import ARCHITECTURES, write_tiny
from torch import Tensor
from transformers import (
    DynamicCache,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
)

from rollout import EngineConfig, Rollout, SamplingParams
from rollout.api.diagnosing.diagnosis import diagnose
from rollout.distributed import TensorParallel
from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig
from rollout.server.preflight import check

KV_CODES = {"int8_per_token_head": torch.int8, "fp8_per_token_head": torch.float8_e4m3fn}
ROWS = [29, 6, 43]  # beyond windows of seven
KEPT_WHOLE = ("gemma2", "llama", "mistral", "olmo2", "qwen3", "gpt_oss", "qwen3_moe", "smollm3")
ENGINE: dict[str, Any] = {
    "device": "cpu", "num_threads": 1, "num_kv_blocks": 40, "block_size": 8, "max_model_len": 128,
    "skip_tokenizer_init": True, "dtype": "float32",
}  # fmt: skip
HEAD = [7, 3, 11, 200, 5, 9, 42, 17] * 3
PROMPTS = [HEAD, [*HEAD[:19], 3, 4], [90, 91] * 4]
GREEDY = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)


class RoundedCache(DynamicCache):
    """Of transformers: what it keeps of a token and head is one of few multiples of a scale."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def update(self, keys: Tensor, values: Tensor, *rest: Any, **more: Any) -> Any:
        return super().update(self.rounded(keys), self.rounded(values), *rest, **more)

    def rounded(self, x: Tensor) -> Tensor:
        most = x.abs().max(dim=-1, keepdim=True).values
        if self.kind == "int8_per_token_head":
            return torch.round(x / most * 127) / 127 * most
        return (x / most * 448).to(torch.float8_e4m3fn).float() / 448 * most


@pytest.mark.parametrize("kind", KV_CODES)
@pytest.mark.parametrize("arch", KEPT_WHOLE)
def test_logits_are_those_of_transformers_with_a_cache_that_rounds_alike(
    tmp_path: Path, arch: str, kind: str
) -> None:
    """At one rank and two, in steps, in both layouts. Where the last bits of a key decide which of
    two codes it becomes, ours may be the other: what that makes is far below the rounding itself.
    """
    source = write_tiny(tmp_path, arch)
    config = ModelConfig.from_directory(tmp_path)
    weights, sequences = source.state_dict(), prompts(config.vocab_size, ROWS)
    wanted, plain = (
        torch.cat([_logits(source, ids, cache()) for ids in sequences]).log_softmax(-1)
        for cache in (lambda: RoundedCache(kind), DynamicCache)
    )

    def work(tp: TensorParallel) -> list[Tensor]:
        found = []
        for layout in ("plain", "tiles"):
            session = Session(loaded(config, tp, weights, layout=layout), sequences, KV_CODES[kind])
            parts = [session.advance(step) for step in ([20, 3, 11], [8, 2, 31], [1, 1, 1])]
            rows = [torch.cat(each) for each in zip(*parts, strict=True)]
            found.append(torch.cat(rows).log_softmax(-1))
        return found

    for size in (1, 2):
        for got in (each for rank in run_ranks(size, work) for each in rank):
            off, rounding = (got - wanted).abs(), (plain - wanted).abs()
            assert off.median() < rounding.median() / 100
            assert off.mean() < rounding.mean() / 20
            assert off.max() < rounding.max()


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_every_architecture_computes_near_what_it_does_without(tmp_path: Path, arch: str) -> None:
    """int8 nearer than fp8, and each the same however it is cut. (What these random weights make of
    a token rests on how it is mixed with others more than in a trained model.)
    """
    source = write_tiny(tmp_path, arch)
    config = ModelConfig.from_directory(tmp_path)
    sequences, weights = prompts(config.vocab_size, ROWS), source.state_dict()
    model = loaded(config, TensorParallel(), weights)

    def logits(kind: torch.dtype | None, *steps: list[int]) -> Tensor:
        session = Session(model, sequences, kind)
        parts = [session.advance(step) for step in steps or [ROWS]]
        return torch.cat([torch.cat(each) for each in zip(*parts, strict=True)])

    plain, mean = logits(None), {}
    for name, kind in KV_CODES.items():
        whole = logits(kind)
        off = (logits(kind, [20, 3, 11], [9, 3, 32]) - whole).abs()
        mean[name] = float((whole - plain).abs().mean())
        assert off.mean() < mean[name] / 20
    assert 0 < 2 * mean["int8_per_token_head"] < mean["fp8_per_token_head"] < plain.std() / 5


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tiny")
    write_tiny(where / "own", "qwen3", seed=1)
    write_tiny(where / "new", "qwen3", seed=5)
    write_tiny(where / "sparse", "deepseek_v32")
    return where


@pytest.mark.parametrize("kind", KV_CODES)
def test_an_engine_gives_every_token_what_its_prompt_would_score(tiny: Path, kind: str) -> None:
    """In batches, with blocks that are found again, preempted, drafted for, over two ranks; after
    an update as a fresh start gives it.
    """
    settings = {**ENGINE, "kv_cache_dtype": kind, "deterministic": True}
    wanted: dict[str, Any] = {}
    for name in ("own", "new"):
        with Rollout(str(tiny / name), **settings) as rollout:
            wanted[name] = [_answer(rollout, prompt) for prompt in PROMPTS]
    assert wanted["own"] != wanted["new"]
    drafts = {"num_speculative_tokens": 3}
    beside = {"components": {"draft": str(tiny / "own")}, "draft_component": "draft", **drafts}
    courses: list[dict[str, Any]] = [
        {},
        {"num_kv_blocks": 17},
        drafts,
        beside,
        {"tensor_parallel_size": 2},
    ]
    for course in courses:
        with Rollout(str(tiny / "own"), **{**settings, **course}) as rollout:
            for name in ("own", "own", "new"):
                if name == "new":
                    rollout.update_weights(str(tiny / name))
                    rollout.sleep()
                    rollout.wake_up()
                got = rollout.generate(PROMPTS * 2, GREEDY)
                assert [_shown(one) for one in got] == wanted[name] * 2, course


def _answer(rollout: Rollout, prompt: list[int]) -> Any:
    """One request alone, whose tokens a second one scores as a prompt."""
    [output] = rollout.generate([prompt], GREEDY)
    ids = output.outputs[0].token_ids
    [again] = rollout.generate([prompt + ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    scored = [
        one[token] for one, token in zip(again.prompt_logprobs[-len(ids) :], ids, strict=True)
    ]
    assert scored == pytest.approx(list(output.outputs[0].logprobs.raw), abs=1e-6)
    return _shown(output)


def _shown(output: Any) -> Any:
    return list(output.outputs[0].token_ids), list(output.outputs[0].logprobs.raw)


def test_blocks_take_as_much_less_memory(tiny: Path) -> None:
    """A byte an element and four for each head, of keys and of values; an index stays as it is."""
    sizes = {}
    for name in ("own", "sparse"):
        for kind in ("auto", *KV_CODES):
            config = EngineConfig(model=str(tiny / name), **{**ENGINE, "kv_cache_dtype": kind})
            found = check(config)
            sizes[name, kind] = found.kv_bytes_per_token
            assert f"{found.kv_bytes_per_token} bytes a token" in "\n".join(found.lines())
    own = json.loads((tiny / "own" / "config.json").read_text())
    heads = 2 * own["num_hidden_layers"] * own["num_key_value_heads"]
    assert sizes["own", "auto"] == heads * own["head_dim"] * 4
    sparse = json.loads((tiny / "sparse" / "config.json").read_text())
    layers, width = sparse["num_hidden_layers"], sparse["kv_lora_rank"] + sparse["qk_rope_head_dim"]
    saved = sizes["sparse", "auto"] - layers * (4 * width - (width + 4))
    for kind in KV_CODES:
        assert sizes["own", kind] == heads * (own["head_dim"] + 4)
        assert sizes["sparse", kind] == saved


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("fp8", "fp8_per_token_head"),
        ("fp8_e4m3", "fp8_per_token_head"),
        (torch.float8_e4m3fn, "fp8_per_token_head"),
        ("int8", "int8_per_token_head"),
        (torch.int8, "int8_per_token_head"),
        ("auto", "auto"),
    ],
)
def test_what_others_call_them_is_known(given: Any, meant: str) -> None:
    assert EngineConfig(model="m", kv_cache_dtype=given).kv_cache_dtype == meant


def test_what_cannot_be_is_refused_by_name(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_dtype must be one of auto, int8_per_.*e5m2"):
        EngineConfig(model="m", kv_cache_dtype="fp8_e5m2")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "vocab_size": 64}
    MambaForCausalLM(MambaConfig(**sizes)).save_pretrained(tmp_path)
    refused = EngineConfig(model=str(tmp_path), **{**ENGINE, "kv_cache_dtype": "int8"})
    for start in (check, lambda config: Rollout(**config.to_dict())):
        with pytest.raises(ConfigError, match="'int8_per_token_head': MambaForCausalLM attends by"):
            start(refused)


@pytest.mark.parametrize("kind", KV_CODES)
def test_modules_of_transformers_attend_over_rounded_pages_too(tmp_path: Path, kind: str) -> None:
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 128, "vocab_size": 320}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3)).eval()
    model.save_pretrained(tmp_path)
    settings = {**ENGINE, "kv_cache_dtype": kind, "max_num_batched_tokens": 16}
    with Rollout(str(tmp_path), **settings) as rollout:
        outputs = rollout.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = [*prompt, *output.outputs[0].token_ids]
        wanted, plain = (
            _logits(model, ids, cache)[len(prompt) - 1 : -1].log_softmax(-1)
            for cache in (RoundedCache(kind), DynamicCache())
        )
        at = torch.tensor(ids[len(prompt) :])[:, None]
        ours = torch.tensor(list(output.outputs[0].logprobs.raw))
        off, rounding = ((each.gather(1, at)[:, 0] - ours).abs().mean() for each in (wanted, plain))
        assert off < rounding / 20


def test_a_comparison_of_layers_names_what_differs_from_the_start(tiny: Path) -> None:
    settings = {**ENGINE, "kv_cache_dtype": "int8"}
    named = pytest.raises(ConfigError, match="keeps keys and values as int8_per_token_head")
    with Rollout(str(tiny / "own"), **settings) as rollout, named:
        diagnose(rollout, str(tiny / "own"), sequences=1)


def _logits(model: Any, ids: list[int], cache: DynamicCache) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(torch.tensor([ids]), past_key_values=cache, use_cache=True).logits
    return logits[0].float()
