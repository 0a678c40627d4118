"""Two tiny checkpoints of one tied model, which four ranks can share."""

from __future__ import annotations

import pytest
import torch
from tiny_models import write_tiny

from rollout.models.config import ModelConfig


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
