"""One tensor in memory that is several tensors of the files, told by slots."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weights import (
    Box,
    LazyTensor,
    Shape,
    SparsePatch,
    TensorPiece,
    WeightSlot,
    WeightValue,
)


@dataclass(frozen=True, slots=True)
class FusedBoxes:
    """A tensor of ``shape`` in memory; ``held``: file names, and the box of it that each one is.

    ``dropped``: how many of the first dimensions of those boxes, of one index each, files leave out
    (of experts: their number).
    """

    name: str
    shape: Shape
    held: tuple[tuple[str, Box], ...]
    dropped: int = 0

    # As of two fused tensors of which one shows how the other lies: these lie in one way alone.
    sibling: ClassVar[str] = ""
    ambiguous: ClassVar[bool] = False

    def is_transposed(self, shape: Shape) -> bool:
        if tuple(shape) != self.shape:
            raise WeightMismatch(
                f"{self.name}: has shape {tuple(shape)}, the model needs {self.shape}"
            )
        return False

    def boxes(self, experts: range | None = None) -> Iterator[tuple[str, Box]]:
        """Each file-form tensor and its box of this one."""
        yield from self.held

    def split_shape(self) -> list[tuple[str, Shape]]:
        """Each file-form tensor and its shape."""
        return [(name, box.shape[self.dropped :]) for name, box in self.boxes()]

    def split(self, value: WeightValue) -> Iterator[tuple[str, WeightValue]]:
        """``value`` as file-form values."""
        self.is_transposed(tuple(value.shape))
        for name, box in self.boxes():
            shape = box.shape[self.dropped :]
            if isinstance(value, Tensor):
                yield name, value[box.slices].reshape(shape)
            elif isinstance(value, LazyTensor):
                yield name, LazyTensor(shape, value.dtype, self._reader(value, box))
            elif isinstance(value, TensorPiece):
                if (inside := box.intersect(value.box)) is None:
                    continue
                there = self._within(box, inside)
                back = tuple(-start for start in value.box.starts)
                values = value.values[inside.shifted(back).slices].reshape(there.shape)
                yield name, TensorPiece(shape, value.dtype, there, values)
            else:
                yield name, patch_of(self.name, value, box, shape)

    def split_box(self, box: Box, shape: Shape) -> Iterator[tuple[str, Box]]:
        """The file-form boxes that ``box`` of a value of ``shape`` holds."""
        self.is_transposed(shape)
        for name, whole in self.boxes():
            if (common := whole.intersect(box)) is not None:
                yield name, self._within(whole, common)

    def _within(self, whole: Box, inside: Box) -> Box:
        """``inside`` in the coordinates of the file-form tensor that is ``whole``."""
        moved = inside.shifted(tuple(-start for start in whole.starts))
        return Box(moved.starts[self.dropped :], moved.stops[self.dropped :])

    def _reader(self, value: LazyTensor, whole: Box) -> Callable[[Box], Tensor]:
        zeros, ones = (0,) * self.dropped, (1,) * self.dropped

        def read(box: Box) -> Tensor:
            there = Box((*zeros, *box.starts), (*ones, *box.stops)).shifted(whole.starts)
            return value.read(there).reshape(box.shape)

        return read


def from_slots(
    slots: Iterable[WeightSlot], files: Mapping[str, Shape]
) -> tuple[dict[str, str], dict[str, FusedBoxes]]:
    """The tensors in memory (``param``) that ``slots`` make of whole tensors of the ``files``.

    First those that are one tensor under another name, then those that hold several; what is not
    tiled by whole tensors of the files is left out.
    """
    held: dict[str, list[WeightSlot]] = defaultdict(list)
    for slot in slots:
        if slot.param not in files and files.get(slot.source) == slot.shape:
            held[slot.param].append(slot)
    renames, fused = {}, {}
    for name, found in held.items():
        shape = tuple(map(max, zip(*(slot.put.stops for slot in found), strict=True)))
        dropped = {len(shape) - len(slot.shape) for slot in found}
        whole = all(
            slot.take == Box.full(slot.shape)
            and slot.put.shape == (1,) * (len(shape) - len(slot.shape)) + slot.shape
            for slot in found
        )
        tiled = sum(slot.put.numel for slot in found) == Box.full(shape).numel
        if not whole or not tiled or len(dropped) != 1:
            continue
        if len(found) == 1 and found[0].shape == shape:
            renames[name] = found[0].source
        else:
            parts = tuple((slot.source, slot.put) for slot in found)
            fused[name] = FusedBoxes(name, shape, parts, dropped.pop())
    return renames, fused


def patch_of(name: str, value: SparsePatch, box: Box, shape: Shape) -> SparsePatch:
    """Of ``value`` what lies in ``box``, whole rows of it in one run of flat positions."""
    axis = next((i for i, size in enumerate(box.shape) if size > 1), len(box.shape))
    if box.shape[axis + 1 :] != tuple(value.shape)[axis + 1 :]:
        raise WeightMismatch(f"{name}: changes of a part of its columns have to come unfused")
    first = 0
    for start, size in zip(box.starts, value.shape, strict=True):
        first = first * size + start
    ends = torch.tensor([first, first + box.numel], device=value.positions.device)
    low, high = torch.searchsorted(value.positions, ends).tolist()
    return SparsePatch(
        shape, value.dtype, value.positions[low:high] - first, value.values[low:high]
    )
