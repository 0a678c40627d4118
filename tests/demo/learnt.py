"""What an example has to leave: other weights than it began with, and these the served ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def check_learnt(start: Path, saved: Path, summary: dict[str, Any]) -> None:
    """``saved``: the trainer's weights at the end. Every linear layer has taken a step."""
    before, after = (load_file(path / "model.safetensors") for path in (start, saved))
    assert {key: tensor.shape for key, tensor in after.items()} == {
        key: tensor.shape for key, tensor in before.items()
    }
    for key in before:
        if "_proj." in key:  # all that adapters change, too
            assert not torch.equal(after[key], before[key]), f"{key} was never stepped"
    assert summary["weights_equal"], "the service holds other weights than the trainer"
