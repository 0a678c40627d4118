"""One tensor in memory whose rows are several tensors of the files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weights import Box, LazyTensor, Shape, SparsePatch, TensorPiece, WeightValue

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


@dataclass(frozen=True, slots=True)
class FusedRows:
    """A tensor of ``shape`` whose rows are those of ``parts``: (file name, first, past the last).

    The convolutions of delta nets that files have apart, and transformers 5 runs as one. When it
    writes that one to files it divides it into parts of equal size, whatever they were (``even``):
    such parts are taken, too, once all of them are there.
    """

    name: str
    shape: Shape
    parts: tuple[tuple[str, int, int], ...]
    sibling: str = ""
    ambiguous: bool = False

    @property
    def even(self) -> dict[str, tuple[int, int]]:
        """First row and the one past the last of each part, of equal parts."""
        rows, count = self.shape[0], len(self.parts)
        each = -(-rows // count)
        starts = (min(rows, i * each) for i in range(count))
        names = (name for name, _, _ in self.parts)
        return {n: (at, min(rows, at + each)) for n, at in zip(names, starts, strict=True)}

    def is_transposed(self, shape: Shape) -> bool:
        if tuple(shape) != self.shape:
            raise WeightMismatch(
                f"{self.name}: has shape {tuple(shape)}, the model needs {self.shape}"
            )
        return False

    def is_even(self, part: str, shape: Shape) -> bool:
        """Whether ``shape`` is that of one of equal parts, where the model's are of others."""
        known = {name: stop - start for name, start, stop in self.parts}
        start, stop = self.even[part]
        return shape[0] != known[part] and shape == (stop - start, *self.shape[1:])

    def boxes(self, experts: range | None = None) -> Iterator[tuple[str, Box]]:
        """Each file-form tensor and its box of this one."""
        for name, start, stop in self.parts:
            zeros = (0,) * (len(self.shape) - 1)
            yield name, Box((start, *zeros), (stop, *self.shape[1:]))

    def split_shape(self) -> list[tuple[str, Shape]]:
        """Each file-form tensor and its shape."""
        return [(name, box.shape) for name, box in self.boxes()]

    def split(self, value: WeightValue) -> Iterator[tuple[str, WeightValue]]:
        """``value`` as file-form values."""
        self.is_transposed(tuple(value.shape))
        for name, box in self.boxes():
            if isinstance(value, Tensor):
                yield name, value[box.slices]
            elif isinstance(value, LazyTensor):
                read = _reader(value, box)
                yield name, LazyTensor(box.shape, value.dtype, read)
            elif isinstance(value, TensorPiece):
                if (inside := box.intersect(value.box)) is None:
                    continue
                back = tuple(-start for start in value.box.starts)
                there = tuple(-start for start in box.starts)
                values = value.values[inside.shifted(back).slices]
                yield name, TensorPiece(box.shape, value.dtype, inside.shifted(there), values)
            else:
                yield name, patch_of(value, box, box.shape)

    def split_box(self, box: Box, shape: Shape) -> Iterator[tuple[str, Box]]:
        """The file-form boxes that ``box`` of a value of ``shape`` holds."""
        self.is_transposed(shape)
        for name, whole in self.boxes():
            if (common := whole.intersect(box)) is not None:
                yield name, common.shifted(tuple(-start for start in whole.starts))

    def joined(self, parts: Mapping[str, WeightValue]) -> Iterator[tuple[str, WeightValue]]:
        """The file-form tensors of all equal parts."""
        whole = []
        for name, _, _ in self.parts:
            value = parts[name]
            if isinstance(value, LazyTensor):
                value = value.read(Box.full(tuple(value.shape)))
            if not isinstance(value, Tensor):
                raise WeightMismatch(f"{name}: of equal parts whole tensors alone are taken")
            whole.append(value)
        yield from self.split(torch.cat(whole))


def fused_rows(shapes: Mapping[str, Shape]) -> Iterator[FusedRows]:
    """Those of the file-form tensors ``shapes``."""
    first, ending = CONVOLUTIONS[0], ".weight"
    for name in shapes:
        prefix, found, rest = name.rpartition(f".{first}{ending}")
        names = [f"{prefix}.{each}{ending}" for each in CONVOLUTIONS]
        if not found or rest or any(each not in shapes for each in names):
            continue
        at, parts = 0, []
        for each in names:
            parts.append((each, at, at + shapes[each][0]))
            at += shapes[each][0]
        yield FusedRows(f"{prefix}.conv1d{ending}", (at, *shapes[name][1:]), tuple(parts))


def patch_of(value: SparsePatch, box: Box, shape: Shape) -> SparsePatch:
    """Of ``value`` what lies in ``box``, whole rows of it in one run of flat positions."""
    first = 0
    for start, size in zip(box.starts, value.shape, strict=True):
        first = first * size + start
    ends = torch.tensor([first, first + box.numel], device=value.positions.device)
    low, high = torch.searchsorted(value.positions, ends).tolist()
    return SparsePatch(
        shape, value.dtype, value.positions[low:high] - first, value.values[low:high]
    )


def _reader(value: LazyTensor, whole: Box) -> Callable[[Box], Tensor]:
    return lambda box: value.read(box.shifted(whole.starts))
