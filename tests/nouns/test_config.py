"""Settings refuse what they do not know, and say what was probably meant."""

import os
import re
import subprocess
import sys
import tracemalloc
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rollout import Rollout
from rollout.config import EngineConfig
from rollout.errors import ConfigError, InvalidRequest
from rollout.generation import Logprobs, SamplingParams
from rollout.wire.spellings import EMBEDDED, SAMPLING, asks_by_zero, near


def test_an_unknown_engine_setting_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensor_parallel_size'"):
        EngineConfig.from_dict({"model": "m", "tensor_parallel_siz": 2})


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"tp": 2}, "unknown engine setting 'tp'; here it is 'tensor_parallel_size'"),
        ({"enforce_eager": True}, "here it is cuda_graphs='off'"),
        ({"mem_fraction_static": 0.9}, "here it is 'gpu_memory_utilization'"),
        ({"port": 8000}, "r.serve(host, port"),
        ({"bloc_size": 8}, "did you mean 'block_size'?"),
        ({"max_total_tokens": 8}, "use num_kv_blocks= N, each of block_size= tokens"),
        ({"rope_scaling": {}}, 'use hf_overrides= {"rope_parameters": {...}}'),
        ({"compilation_config": 3}, "cuda_graphs= and cuda_graph_sizes= say what is captured"),
    ],
)
def test_a_setting_in_another_engines_words_is_told_in_ours(theirs, words) -> None:
    for make in (lambda: EngineConfig(model="m", **theirs), lambda: Rollout("m", **theirs)):
        with pytest.raises(ConfigError, match=re.escape(words)):
            make()


@pytest.mark.parametrize(
    ("theirs", "words"),
    [
        ({"max_new_tokens": 4}, "unknown sampling parameter 'max_new_tokens'; here it is 'max_tok"),
        ({"guided_json": {}}, "use structured_outputs={'json': ...}"),
        ({"output_kind": 2}, "leave it out: generate() gives what is finished"),
        ({"return_logprob": True}, "logprobs of the sampled tokens always come"),
        ({"stop_regex": "a+"}, "use stop, or structured_outputs={'regex': ...}"),
        ({"do_sample": True}, "temperature=0 is greedy"),
        ({"temprature": 1.0}, "did you mean 'temperature'?"),
    ],
)
def test_a_parameter_in_another_engines_words_is_told_in_ours(theirs, words) -> None:
    for make in (lambda: SamplingParams(**theirs), lambda: SamplingParams.from_dict(theirs)):
        with pytest.raises(InvalidRequest, match=re.escape(words)):
            make()
    with pytest.raises(InvalidRequest, match="given by name"):
        SamplingParams(0.7)


def test_logprobs_that_are_taken_for_a_list_say_that_they_are_columns() -> None:
    with pytest.raises(TypeError, match=r"Logprobs are columns: \.raw\[0\] and \.processed\[0\]"):
        Logprobs([-1.0], [-1.0], [0.0])[0]


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_all_alternatives_are_asked_for_by_the_size_of_the_vocabulary(name: str) -> None:
    says = f"^{name} must be from 0 to the vocabulary's size .vLLM's -1, all, is that size., or N"
    with pytest.raises(InvalidRequest, match=says):
        SamplingParams(**{name: -1})


def test_every_spelling_of_others_leads_to_a_field_of_ours() -> None:
    """And no text names a setting that there is not."""
    for spellings, cls in ((EMBEDDED, EngineConfig), (SAMPLING, SamplingParams)):
        known = {field.name for field in fields(cls)}
        for theirs, ours in spellings.same.items():
            assert (ours if isinstance(ours, str) else ours[0]) in known - {theirs}
        for theirs in spellings.refused:
            assert theirs not in known
            named = re.findall(r"<(\w+)>", str(spellings.why_refused(theirs, "<{}>".format)))
            assert set(named) <= known


@pytest.mark.parametrize(
    "setting",
    [
        {"dtype": "int8"},
        {"device": "tpu"},
        {"tensor_parallel_size": 0},
        {"block_size": 1.5},
        {"timeout": 0},
        {"executor": "inline", "tensor_parallel_size": 2},
        {"staging": "disk"},
        {"num_threads": True},
        {"num_threads": 1025},
        {"kv_cache_bytes": 10**400},
        {"max_adapters": 1 << 63},
        {"journal": "a\0b"},
        {"chat_template": "\ud800"},
        {"tokenizer": 3},
        {"timeout": "30"},
        {"weight_dirs": 3},
        {"cuda_graph_sizes": "3"},
        {"max_parallel_loading_workers": 0},
        {"gpu_memory_utilization": 0},
        {"gpu_memory_utilization": 90},
        {"lora_embeddings": True},
        {"lora_experts": True},
        {"load_format": None},
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(setting) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(model="m", **setting)


@pytest.mark.parametrize("name", ["model", "tokenizer", "served_model_name", "journal"])
def test_an_empty_text_is_no_setting(name: str) -> None:
    """Of a shell's variable that is not set; as a path it would be the working directory."""
    with pytest.raises(ConfigError, match=f"{name} is empty"):
        EngineConfig(**{"model": "m", name: ""})
    for dirs in ("", ["a", ""]):
        with pytest.raises(ConfigError, match="weight_dirs is empty"):
            EngineConfig(model="m", weight_dirs=dirs)  # type: ignore[arg-type]


def test_a_value_that_is_none_of_its_choices_is_told_what_was_meant() -> None:
    for setting, words in (
        ({"dtype": "bfloat"}, "did you mean 'bfloat16'?"),
        ({"dtype": "fp8"}, "weights in fewer bits are a matter of quantization"),
        ({"quantization": "fp8block"}, "did you mean 'fp8_block'?"),
        ({"quantization": "awq"}, "what files are in is seen from them, and kept by 'auto'"),
        ({"device": "gpu"}, "a GPU is 'cuda'"),
        ({"device": "cuda:1"}, "rank N takes the N-th GPU"),
        ({"staging": "devices"}, "did you mean 'device'?"),
    ):
        with pytest.raises(ConfigError) as refused:
            EngineConfig(**{"model": "m", **setting})
        assert words in str(refused.value)
    with pytest.raises(ConfigError, match=r"not a Linear: start from its checkpoint"):
        EngineConfig(model=torch.nn.Linear(1, 1))  # type: ignore[arg-type]


def test_settings_may_be_paths_and_torchs_own_nouns(tmp_path: Path) -> None:
    config = EngineConfig(
        model=tmp_path, weight_dirs=tmp_path, journal=tmp_path, cuda_graph_sizes=4,
        dtype=torch.bfloat16, device=torch.device("cpu"),
    )  # fmt: skip
    told = str(tmp_path)
    assert (config.model, config.weight_dirs, config.journal) == (told, (told,), told)
    assert (config.dtype, config.device, config.cuda_graph_sizes) == ("bfloat16", "cpu", (4,))
    assert EngineConfig(model="m", weight_dirs="/runs").weight_dirs == ("/runs",)
    assert EngineConfig(model="m", dtype="half").dtype == "float16"
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        EngineConfig(model="m", device="cuda:1")
    with pytest.raises(ConfigError, match=r"keywords: Rollout\(\*\*config.to_dict"):
        Rollout(config)


def test_settings_survive_their_plain_form() -> None:
    config = EngineConfig(model="m", tensor_parallel_size=2, weight_dirs=("a", "b"))
    assert EngineConfig.from_dict(config.to_dict()) == config


def test_an_unknown_sampling_parameter_names_the_nearest_known_one() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'temperature'"):
        SamplingParams.from_dict({"temprature": 1.0})


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 0},
        {"n": 2, "temperature": 0.0},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 8},
        {"repetition_penalty": 0.0},
        {"stop": ("",)},
        {"stop": "x", "detokenize": False},
        {"seed": 1.5},
        {"logprobs": -1},
        {"temperature": "hot"},
        {"temperature": None},
        {"top_p": True},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"logit_bias": {"a": 1}},
        {"logit_bias": {1.7: 1}},
        {"logit_bias": {True: 1}},
        {"logit_bias": 5},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: float("-inf")}},
        {"logit_bias": {5: 1e31}},
        {"logit_bias": {5: 10**400}},
        {"logit_bias": dict.fromkeys(range((1 << 16) + 1), 0.0)},
        {"top_k": 10**30},
        {"max_tokens": 10**30},
        {"min_tokens": 10**5000},
        {"logprobs": 10**30},
        {"prompt_logprobs": 1 << 63},
        {"seed": 1 << 63},
        {"seed": -(1 << 63) - 1},
        {"n": 16385},
        {"temperature": 10**400},
        {"temperature": 1e10},
        {"repetition_penalty": 1e-40},
        {"stop": ["x"] * 257},
        {"stop": "x" * 4097},
        {"stop_token_ids": [1] * ((1 << 16) + 1)},
        {"ignore_eos": 1},
    ],
    ids=lambda wrong: str(next(iter(wrong))),
)
def test_contradictory_or_unbounded_sampling_is_refused(wrong) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(wrong))):
        SamplingParams(**wrong)


def test_off_values_of_other_engines_mean_off() -> None:
    params = SamplingParams(top_k=-1, seed=-1, stop="end")
    assert (params.top_k, params.seed, params.stop) == (0, None, ("end",))


def test_a_path_is_a_model_and_a_tokenizer() -> None:
    config = EngineConfig(model=Path("a/b"), tokenizer=Path("c"))  # type: ignore[arg-type]
    assert (config.model, config.tokenizer) == ("a/b", "c")


@pytest.mark.parametrize("name", ["max_queued_requests", "max_num_batched_tokens", "max_staleness"])
def test_the_largest_size_is_written_for_no_bound(name: str) -> None:
    assert getattr(EngineConfig(model="m", **{name: sys.maxsize}), name) == sys.maxsize


def test_a_name_as_long_as_a_book_is_no_misspelling_and_costs_nothing() -> None:
    name = "temperature" * 100_000
    tracemalloc.start()
    try:
        found = near(name, ["temperature", "top_p"])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found is None
    assert peak < 1 << 16


def test_a_name_as_long_as_a_book_is_not_kept() -> None:
    name = "temperature" * 100_000
    before = sys.getrefcount(name)
    assert not asks_by_zero(name, 0, {"temperature": 1.0})
    assert sys.getrefcount(name) == before


def test_a_text_in_any_script_is_a_setting_whatever_the_locale() -> None:
    script = (
        "from rollout.config import EngineConfig; EngineConfig(model='m', chat_template='\\u6a21')"
    )
    plain = {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-c", script], env={**plain, **ascii_only}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
