"""A tiny checkpoint for tests of what runs on a GPU."""

from pathlib import Path
from typing import Any

import pytest
import torch
from card_engines import plain_model
from tiny_models import write_tiny


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-gpu")
    # Few weights: the interpreter, on a pretended card, takes a millisecond for a few hundred.
    sizes = {"num_layers": 1, "vocab_size": 96, "intermediate_size": 64}
    write_tiny(path, "qwen3", dtype=torch.float32, **sizes)
    return path


@pytest.fixture
def trained(tiny_qwen3: Path) -> Any:
    model = plain_model(tiny_qwen3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return model
