"""Which box of which checkpoint tensor lands in which box of which parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rollout.weights.box import Box, Shape
from rollout.weights.packed_rows import FileCodes
from rollout.wire.codec import Text

#: dtypes that become one another by a cast; quantised floats (float8) mean nothing without scales
CASTABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})

#: integers of as many bytes as an element has: what its bits are compared and moved as
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype and shape of one checkpoint tensor, without its values."""

    name: Text
    dtype: torch.dtype
    shape: Shape

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is read box by box: ``read(box)`` returns exactly that box's values.

    ``codes``: of one that is quantised where it is read, in each scheme that can hold them.
    """

    shape: Shape
    dtype: torch.dtype
    read: Callable[[Box], Tensor]
    codes: tuple[FileCodes, ...] = ()


@dataclass(frozen=True, slots=True)
class SparsePatch:
    """Overwrites some elements of a tensor: flat row-major int64 ``positions`` and ``values``.

    Positions are unique and ascending; an element that is not named keeps its value. ``box``: the
    part of the tensor that this patch is about, others of disjoint boxes follow; None: all of it.
    """

    shape: Shape
    dtype: torch.dtype
    positions: Tensor  # [nnz] int64
    values: Tensor  # [nnz] dtype
    box: Box | None = None


@dataclass(frozen=True, slots=True)
class TensorPiece:
    """One box of a tensor; the rest arrives in other, disjoint pieces."""

    shape: Shape  # of the whole tensor
    dtype: torch.dtype
    box: Box
    values: Tensor  # box.shape, dtype


@dataclass(frozen=True, slots=True)
class CellPatch:
    """Replaces cells of a matrix, what shares a scale where it is quantised; the rest stays.

    Cells are those of a ``weights.cells.CellGrid``. ``replaced``: the digest of what each one was
    replaced from, in ``dtype``, all of which was finite.
    """

    shape: Shape
    dtype: torch.dtype
    numbers: Tensor  # [n] int64, ascending
    values: Tensor  # [n, rows, columns] dtype
    replaced: Tensor  # [n] int64, the bits of 64-bit sums


WeightValue = Tensor | LazyTensor | SparsePatch | TensorPiece


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """``param[put] <- source[take]``: one piece of one checkpoint tensor on this rank.

    ``take`` is in the coordinates of ``source`` (whose full shape is ``shape``), ``put`` in those
    of the logical parameter. Both hold the same number of elements in the same row-major order.
    """

    source: Text
    shape: Shape
    take: Box
    param: Text
    put: Box

    @classmethod
    def of_nothing(cls, source: Text, shape: Shape, param: Text, dims: int = 1) -> WeightSlot:
        """Of a source that is known here and not kept: ``param`` has ``dims`` dimensions, and no
        elements.
        """
        return cls(source, shape, Box.empty(len(shape)), param, Box.empty(dims))
