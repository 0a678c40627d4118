"""Whatever a config.json has in the place of a value, the error names the file and a field."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import transformers
import transformers_sweep
from huggingface_hub.errors import StrictDataclassError

from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig

WRONG = ["1e6", -1, float("nan"), 10**400, {"a": 1}]
FEW = ["x", [[1]]]
# Of fields that a class does not write down.
BESIDE = (
    "rope_theta", "rope_scaling", "head_dim", "sliding_window", "partial_rotary_factor",
    "quantization_config", "torch_dtype", "eos_token_id", "layer_types", "rotary_dim",
    "original_max_position_embeddings", "linear_attn_config", "attn_layer_indices",
)  # fmt: skip
QUICK = ("DeepseekV3ForCausalLM", "NemotronHForCausalLM")
MORE = (
    "BambaForCausalLM", "FalconH1ForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM",
    "KimiLinearForCausalLM", "Llama4ForCausalLM", "Olmo3ForCausalLM", "OlmoHybridForCausalLM",
    "PhimoeForCausalLM", "SmolLM3ForCausalLM",
)  # fmt: skip
FILE = "here/config.json"


def tiny(architecture: str) -> dict[str, Any]:
    """The plain config of a tiny model."""
    kind = getattr(transformers, architecture).config_class
    for changes in transformers_sweep.VARIANTS:
        settings = transformers_sweep.tiny_settings(kind(), transformers_sweep.SIZES | changes)
        with suppress(ConfigError, StrictDataclassError):
            values = {**kind(**settings).to_dict(), "architectures": [architecture]}
            ModelConfig.from_hf(values)
            return values
    raise AssertionError(f"no tiny {architecture}")


def places(values: dict[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if not isinstance(name, str):  # of labels
            continue
        yield (*before, name)
        if isinstance(value, dict):
            yield from places(value, (*before, name))


def put(values: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    rest = put(values[place[0]], place[1:], value) if place[1:] else value
    return {**values, place[0]: rest}


@pytest.mark.parametrize(
    ("architecture", "wrong"),
    [
        *(pytest.param(name, WRONG, id=name) for name in QUICK),
        *(pytest.param(name, FEW, id=name, marks=pytest.mark.more) for name in MORE),
    ],
)
def test_a_value_of_a_wrong_kind_is_refused_by_its_name_or_makes_no_difference(
    architecture: str, wrong: list[Any]
) -> None:
    values = tiny(architecture)
    found = list(dict.fromkeys([*places(values), *((name,) for name in BESIDE)]))
    fields = {name for place in found for name in place} - {"architectures"}
    refused, unnamed = 0, []
    for place in found:
        for value in wrong:
            try:
                ModelConfig.from_hf(put(values, place, value), file=FILE)
            except ConfigError as error:
                refused, said = refused + 1, str(error)
                if FILE not in said or not any(name in said for name in fields):
                    unnamed.append((place, value, said))
    assert not [each for each in unnamed if each[0] != ("architectures",)]
    assert refused > 20
