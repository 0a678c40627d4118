"""Architectures resolve lazily, to the first supported one."""

import re
import subprocess
import sys

import pytest

from rollout.errors import ConfigError
from rollout.models.config.model import ModelConfig
from rollout.models.registry import Registry


def test_the_first_supported_architecture_wins():
    assert Registry().choose(["Foo", "Qwen3ForCausalLM", "LlamaForCausalLM"]) == "Qwen3ForCausalLM"


def test_an_unknown_architecture_lists_those_most_like_it():
    with pytest.raises(ConfigError) as caught:
        Registry().choose(["Qwen3ForCausalML"])
    text = str(caught.value)
    assert "Did you mean 'Qwen3ForCausalLM'?" in text
    assert "Supported: Qwen3ForCausalLM, Qwen" in text
    assert re.search(r"more, and \.\.\..*; docs/models\.md has all, and `rollout check`", text)
    assert len(text) < 500


def test_what_is_declared_here_asks_no_installed_package(monkeypatch):
    """It would read the files of all of them, at every start."""
    asked = []
    monkeypatch.setattr("rollout.models.registry.installed_models", lambda: asked.append(1) or {})
    assert Registry().choose(["Strange", "Qwen3ForCausalLM"]) == "Qwen3ForCausalLM"
    assert not asked
    assert not Registry().knows(["Strange"])
    assert asked


def test_registering_gives_a_wider_registry_and_leaves_the_first_as_it_was():
    first = Registry()
    wider = first.register_model(
        "MyForCausalLM", "rollout.models.architectures.llama:LlamaForCausalLM"
    )
    values = {
        "architectures": ["MyForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
    }
    assert ModelConfig.from_hf(values, registry=wider).architecture == "MyForCausalLM"
    assert wider.load("MyForCausalLM") == first.load("LlamaForCausalLM")
    with pytest.raises(ConfigError, match="MyForCausalLM"):
        first.choose(["MyForCausalLM"])


def test_a_class_that_cannot_be_imported_is_a_config_error():
    with pytest.raises(ConfigError, match="cannot import nowhere:Cls"):
        Registry().register_model("A", "nowhere:Cls").load("A")
    with pytest.raises(ConfigError, match=r"package.module:Class"):
        Registry().register_model("A", "nowhere.Cls")


def test_reading_a_config_imports_neither_models_nor_transformers():
    code = (
        "import sys, rollout.models.config.model;"
        "bad = {'transformers', 'rollout.models.causal_lm'};"
        "sys.exit(' '.join(bad & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
