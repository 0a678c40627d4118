"""``hf_overrides``: what is replaced in a config.json, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny

from rollout.errors import ConfigError
from rollout.models.config.layer import RopeConfig
from rollout.models.config.model import ModelConfig

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("written")
    write_tiny(path, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    return path


def rope(path: Path, **overrides: Any) -> RopeConfig:
    return ModelConfig.from_directory(path, overrides=overrides).layers[0].rope


def test_ropes_base_may_be_said_at_the_top_as_earlier_files_do(written: Path) -> None:
    assert "rope_theta" not in json.loads((written / "config.json").read_text())
    assert rope(written).theta == 5e5
    assert rope(written, rope_theta=1e6) == rope(written, rope_parameters={"rope_theta": 1e6})
    assert rope(written, rope_theta=1e6).theta == 1e6


def test_rope_that_is_scaled_keeps_the_base_of_the_file(written: Path) -> None:
    scaled = rope(written, rope_scaling=YARN)
    assert (scaled.kind, scaled.theta, scaled.scaling["factor"]) == ("yarn", 5e5, 4.0)
    assert rope(written, rope_scaling=YARN, rope_theta=2e4).theta == 2e4


def test_where_layers_differ_it_has_to_be_said_of_which(tmp_path: Path) -> None:
    write_tiny(tmp_path, "gemma3")
    with pytest.raises(ConfigError, match=r"'rope_theta' is said by layers here: .*full_attention"):
        rope(tmp_path, rope_theta=1e6)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("sliding_windw", "did you mean 'sliding_window'"),
        ("rope_thetaa", "did you mean 'rope_theta'"),
        ("rms_norm_epsilon", "did you mean 'rms_norm_eps'"),
    ],
)
def test_a_name_that_nothing_reads_is_refused(written: Path, name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"hf_overrides: {name} is no field.*{hint}"):
        rope(written, **{name: 8})


def test_a_field_of_the_text_model_alone_is_looked_for_there(written: Path, tmp_path: Path) -> None:
    text = json.loads((written / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    with pytest.raises(ConfigError, match=r"one of text_config's: .*'rms_norm_eps'"):
        rope(tmp_path, rms_norm_eps=1e-3)
    with pytest.raises(ConfigError, match=r"text_config\.rms_norm_ep is no field"):
        rope(tmp_path, text_config={"rms_norm_ep": 1e-3})
