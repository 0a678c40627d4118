"""Flat row-major positions of a tensor's elements, and the same of a box of it."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from rollout.weights import Box, Shape

Kept = slice | Tensor  # which of some positions: a run of them, or int64 indices


def positions_in_whole(positions: Tensor, box: Box, shape: Shape) -> Tensor:
    """Flat row-major positions of ``box`` as those of a tensor of ``shape``; order is kept."""
    if box.shape[1:] == shape[1:]:  # whole rows: one run
        return positions + box.starts[0] * prod(shape[1:]) if shape else positions
    found = torch.zeros_like(positions)
    rest = positions
    for axis in reversed(range(len(shape))):
        size, stride = box.shape[axis], prod(shape[axis + 1 :])
        if box.shape[:axis] == (1,) * axis:  # the coordinates before it are constants
            start = sum(box.starts[a] * prod(shape[a + 1 :]) for a in range(axis))
            return found + (rest + box.starts[axis]) * stride + start
        found += (rest % size + box.starts[axis]) * stride
        rest = rest // size
    return found


def positions_inside(box: Box, shape: Shape, positions: Tensor) -> tuple[Kept, Tensor]:
    """Which of those ascending flat row-major ``positions`` of ``shape`` lie in ``box``, and the
    same as flat positions of the box.
    """
    if box.shape[1:] == shape[1:]:  # whole rows: one run
        row = prod(shape[1:])
        start, stop = (box.starts[0] * row, box.stops[0] * row) if shape else (0, 1)
        ends = torch.tensor([start, stop], device=positions.device)
        first, last = torch.searchsorted(positions, ends).tolist()
        return slice(first, last), positions[first:last] - start
    inside = torch.ones_like(positions, dtype=torch.bool)
    for c, start, stop in zip(_unravel(positions, shape), box.starts, box.stops, strict=True):
        inside &= (c >= start) & (c < stop)
    kept = inside.nonzero().flatten()
    pairs = zip(_unravel(positions[kept], shape), box.starts, strict=True)
    return kept, _ravel([c - start for c, start in pairs], box.shape)


def _unravel(flat: Tensor, shape: Shape) -> list[Tensor]:
    coordinates = []
    for axis, size in enumerate(shape):
        inner = prod(shape[axis + 1 :])
        # The outermost coordinate needs no modulus; 1-D and 2-D sources are the common case.
        c = flat if inner == 1 else flat // inner
        coordinates.append(c if axis == 0 else c % size)
    return coordinates


def _ravel(coordinates: list[Tensor], shape: Shape) -> Tensor:
    flat = coordinates[0]
    for c, size in zip(coordinates[1:], shape[1:], strict=True):
        flat = flat * size + c
    return flat
