"""Shards of flattened tensors (FSDP1, ZeRO-3) as boxes of the tensors."""

from __future__ import annotations

from torch import Tensor

from rollout.weight_sync.boxes import interval_boxes
from rollout.weights import Box, Shape


def interval_values(shape: Shape, start: int, values: Tensor) -> list[tuple[Box, Tensor]]:
    """The boxes of elements ``start`` and on of a row-major tensor, each with its values.

    ``values``: flat, as many as the interval is long; what comes back are views of it.
    """
    found = []
    end = 0
    for box in interval_boxes(shape, start, start + values.numel()):
        found.append((box, values[end : end + box.numel].view(box.shape)))
        end += box.numel
    return found
