"""Boxes of one tensor: made disjoint, cut to a size, and as runs of flattened tensors have them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

from rollout.weights import Box, Shape


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
