"""Boxes of tensors: intersected, made disjoint, cut to a size, and as runs of flattened tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from operator import gt, lt, sub

from torch import Tensor

from rollout.wire.codec import Dims

Shape = Dims


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open axis-aligned box of element coordinates: ``starts[i] <= x[i] < stops[i]``."""

    starts: Shape
    stops: Shape

    def __post_init__(self) -> None:
        if (
            len(self.starts) != len(self.stops)
            or min(self.starts, default=0) < 0
            or any(map(gt, self.starts, self.stops))
        ):
            raise ValueError(f"not a box: starts {self.starts}, stops {self.stops}")

    def __str__(self) -> str:
        return f"[{', '.join(f'{a}:{b}' for a, b in zip(self.starts, self.stops, strict=True))}]"

    @classmethod
    def full(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @classmethod
    def empty(cls, dims: int) -> Box:
        """Of no elements, in so many dimensions."""
        return cls((0,) * dims, (0,) * dims)

    @property
    def shape(self) -> Shape:
        return tuple(map(sub, self.stops, self.starts))

    @property
    def numel(self) -> int:
        return prod(map(sub, self.stops, self.starts))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.starts, self.stops, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(lt, starts, stops)) else None

    def shifted(self, by: Shape) -> Box:
        return Box(
            tuple(a + d for a, d in zip(self.starts, by, strict=True)),
            tuple(b + d for b, d in zip(self.stops, by, strict=True)),
        )

    def fits(self, shape: Shape) -> bool:
        return len(shape) == len(self.stops) and not any(map(gt, self.stops, shape))


def disjoint(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """The same elements, each in one box; boxes that share none come back as they are."""
    found: list[Box] = []
    for box in boxes:
        parts = [box] if box.numel else []
        for other in found:
            if other.intersect(box) is not None:
                parts = [rest for part in parts for rest in _minus(part, other)]
        found += parts
    return tuple(found)


def cut(box: Box, most: int) -> Iterator[Box]:
    """``box`` in parts of at most ``most`` elements: of whole rows, else of parts of rows."""
    if box.numel <= most:
        yield box
        return
    axis = next(i for i, n in enumerate(box.shape) if n > 1)
    rows = most // (box.numel // box.shape[axis])
    for start in range(box.starts[axis], box.stops[axis], max(1, rows)):
        stop = min(start + max(1, rows), box.stops[axis])
        part = _within(box, axis, start, stop)
        yield from [part] if rows else cut(part, most)


def interval_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Elements ``start <= i < stop`` of a row-major tensor as at most ``2 * len(shape) - 1`` boxes.

    In ascending order; for shards of flattened tensors (FSDP1, ZeRO-3).
    """
    if stop <= start:
        return []
    if not shape:
        return [Box((), ())]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _in_row(first, interval_boxes(shape[1:], start - first * row, stop - first * row))
    head = -(-start // row)
    tail = stop // row
    boxes = (
        _in_row(first, interval_boxes(shape[1:], start - first * row, row)) if start % row else []
    )
    if head < tail:
        zeros = (0,) * (len(shape) - 1)
        boxes.append(Box((head, *zeros), (tail, *shape[1:])))
    if stop % row:
        boxes += _in_row(last, interval_boxes(shape[1:], 0, stop - last * row))
    return boxes


def _in_row(row: int, boxes: list[Box]) -> list[Box]:
    return [Box((row, *box.starts), (row + 1, *box.stops)) for box in boxes]


def _within(box: Box, axis: int, start: int, stop: int) -> Box:
    return Box(
        (*box.starts[:axis], start, *box.starts[axis + 1 :]),
        (*box.stops[:axis], stop, *box.stops[axis + 1 :]),
    )


def _minus(box: Box, other: Box) -> list[Box]:
    """``box`` without ``other``, as disjoint boxes."""
    common = box.intersect(other)
    if common is None:
        return [box]
    parts = []
    for axis, (low, high) in enumerate(zip(common.starts, common.stops, strict=True)):
        if box.starts[axis] < low:
            parts.append(_within(box, axis, box.starts[axis], low))
        if high < box.stops[axis]:
            parts.append(_within(box, axis, high, box.stops[axis]))
        box = _within(box, axis, low, high)
    return parts


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
