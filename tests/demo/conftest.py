"""The demo's modules are importable by the names its scripts use."""

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "trainer_examples"))

from addition_task import (
    answer_batch,
    expected_reward,
    make_model,
    problems,
    save_checkpoint,
)


@pytest.fixture(scope="session")
def half_right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one layer that answers half of what the examples' first steps ask.

    So samples of one prompt earn different rewards, and every step has a gradient.
    """
    asked = [p for step in range(6) for p in problems(8, random.Random(f"0-{step}"))]
    model = make_model(layers=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    ids, labels = answer_batch(asked)
    while expected_reward(model, asked) < 0.5:
        logits = model(ids).logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    path: Path = tmp_path_factory.mktemp("start") / "checkpoint"
    save_checkpoint(model, path)
    return path
