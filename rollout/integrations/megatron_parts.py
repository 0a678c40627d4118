"""Views of a rank's memory as boxes of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rollout.weights import Box, Shape

Place = tuple[int, int]  # (rank, size) along one kind of parallelism


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A box of a file-form tensor of ``shape``, and its values: a view of this rank's memory."""

    name: str
    shape: Shape
    box: Box
    values: Tensor


def whole(name: str, tensor: Tensor) -> Part:
    return rows_from(name, tuple(tensor.shape), 0, tensor)


def rows_from(name: str, shape: Sequence[int], start: int, values: Tensor) -> Part:
    box = Box.full(tuple(values.shape)).shifted((start, *(0,) * (values.dim() - 1)))
    return Part(name=name, shape=tuple(shape), box=box, values=values)


def cut(name: str, values: Tensor, axis: int, place: Place) -> Part:
    """An equal share of ``axis``."""
    rank, size = place
    by, shape = [0] * values.dim(), list(values.shape)
    by[axis], shape[axis] = rank * shape[axis], size * shape[axis]
    box = Box.full(tuple(values.shape)).shifted(tuple(by))
    return Part(name=name, shape=tuple(shape), box=box, values=values)


def gated_mlp(
    module: str, linears: tuple[str, str, str], which: str, tensor: Tensor, place: Place
) -> list[Part]:
    """``linear_fc1`` (this rank's rows of gate, then of up) or ``linear_fc2`` (its columns)."""
    gate, up, down = linears
    if which == "2":
        return [cut(f"{module}.{down}.weight", tensor, 1, place)]
    halves = tensor.chunk(2)
    return [
        cut(f"{module}.{linear}.weight", half, 0, place)
        for linear, half in zip((gate, up), halves, strict=True)
    ]
