"""How the elements of a strided box lie in memory, beside where they are in the full tensor."""

import itertools
from collections.abc import Iterator

from rollout.weights import Shape

Dim = tuple[int, int, int]  # size, stride in memory, stride in positions


def row_major(shape: Shape) -> list[int]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return strides[::-1][: len(shape)]


def collapse(dims: list[Dim]) -> list[Dim]:
    """The same elements in as few dimensions as possible: rows and columns come last.

    The columns' positions are consecutive; a dimension of one element is added where none is so.
    """
    merged: list[Dim] = []
    for size, memory, position in dims:
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * memory, size * position):
            merged[-1] = (merged[-1][0] * size, memory, position)
        else:
            merged.append((size, memory, position))
    if not merged or merged[-1][2] != 1:
        merged.append((1, 1, 1))
    return [(1, 0, 0)] * (2 - len(merged)) + merged


def offsets(outer: list[Dim]) -> Iterator[tuple[int, int]]:
    """(memory, position) offset of every index of the outer dimensions, in elements."""
    for index in itertools.product(*(range(size) for size, _, _ in outer)):
        yield (
            sum(i * memory for i, (_, memory, _) in zip(index, outer, strict=True)),
            sum(i * position for i, (_, _, position) in zip(index, outer, strict=True)),
        )
