"""Changes that go by each element's own value, so that every sharding makes the same ones."""

from __future__ import annotations

import torch

CHANGES = {
    "all": torch.neg,
    "few": lambda x: torch.where(x.abs() < 0.002, -x, x),
    "none": lambda x: x,
}
