"""Settings refuse what they do not know, and say what was probably meant."""

from pathlib import Path

import pytest

from rollout.config import EngineConfig
from rollout.errors import ConfigError, InvalidRequest
from rollout.generation import SamplingParams


def test_an_unknown_engine_setting_names_the_nearest_known_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tensor_parallel_size'"):
        EngineConfig.from_dict({"model": "m", "tensor_parallel": 2})


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
    ],
)
def test_a_setting_out_of_bounds_is_refused_by_name(setting) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        EngineConfig(model="m", **setting)


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
