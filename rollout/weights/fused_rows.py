"""One tensor in memory whose rows are several tensors of the files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.weights import Box, LazyTensor, Shape, WeightValue
from rollout.weights.fused_boxes import FusedBoxes

CONVOLUTIONS = ("q_conv1d", "k_conv1d", "v_conv1d")


@dataclass(frozen=True, slots=True)
class FusedRows(FusedBoxes):
    """A tensor of ``shape`` whose rows are those of the tensors that it holds, one after the other.

    The convolutions of delta nets that files have apart, and transformers 5 runs as one. When it
    writes that one to files it divides it into parts of equal size, whatever they were (``even``):
    such parts are taken, too, once all of them are there.
    """

    @property
    def even(self) -> dict[str, tuple[int, int]]:
        """First row and the one past the last of each part, of equal parts."""
        rows, count = self.shape[0], len(self.held)
        each = -(-rows // count)
        starts = (min(rows, i * each) for i in range(count))
        names = (name for name, _ in self.held)
        return {n: (at, min(rows, at + each)) for n, at in zip(names, starts, strict=True)}

    def is_even(self, part: str, shape: Shape) -> bool:
        """Whether ``shape`` is that of one of equal parts, where the model's are of others."""
        known = {name: box.shape[0] for name, box in self.held}
        start, stop = self.even[part]
        return shape[0] != known[part] and shape == (stop - start, *self.shape[1:])

    def joined(self, parts: Mapping[str, WeightValue]) -> Iterator[tuple[str, WeightValue]]:
        """The file-form tensors of all equal parts."""
        whole = []
        for name, _ in self.held:
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
        at, held = 0, list[tuple[str, Box]]()
        for each in names:
            stop, rest_of = at + shapes[each][0], shapes[each][1:]
            held.append((each, Box((at, *(0 for _ in rest_of)), (stop, *rest_of))))
            at = stop
        yield FusedRows(f"{prefix}.conv1d{ending}", (at, *shapes[name][1:]), tuple(held))
