"""What the ranks of a job hold without any gather, put together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

Boxes = dict[str, list[Any]]


def assembled(
    out: Path, results: list[Any], name: str, wanted: dict[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Each tensor as all ranks hold it, and how many of them hold each element.

    Where several hold one, they must agree: the last one's value is taken after comparing.
    """
    values = {n: torch.full(t.shape, torch.nan, dtype=t.dtype) for n, t in wanted.items()}
    counts = {n: torch.zeros(t.shape, dtype=torch.int64) for n, t in wanted.items()}
    for rank, result in enumerate(results):
        held = load_file(out / f"{name}.{rank}.safetensors")
        for tensor, boxes in result[name]["boxes"]:
            for index, (starts, stops) in enumerate(boxes):
                at = tuple(slice(a, b) for a, b in zip(starts, stops, strict=True))
                part = held[f"{tensor}/{index}"]
                known = counts[tensor][at] > 0
                assert torch.equal(values[tensor][at][known], part[known]), tensor
                values[tensor][at] = part
                counts[tensor][at] += 1
    return values, counts
