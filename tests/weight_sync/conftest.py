"""Two tiny checkpoints of one tied model that four ranks can share, and an engine of the first."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from engine_ranks import Engine
from tiny_models import write_tiny

from rollout.models.config.model import ModelConfig


def file_form(model) -> dict[str, torch.Tensor]:
    return {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"
    }


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    where = tmp_path_factory.mktemp("models")
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    old = write_tiny(where / "old", "qwen3", tied=True, seed=0, **heads)
    new = write_tiny(where / "new", "qwen3", tied=True, seed=1, **heads)
    return ModelConfig.from_directory(where / "old"), file_form(old), file_form(new)


@pytest.fixture
def engine(checkpoints) -> Iterator[Engine]:
    """Of its test alone; a file whose tests go on from one another has one of its own."""
    engine = Engine(checkpoints[0], 2, checkpoints[1])
    yield engine
    engine.close()
