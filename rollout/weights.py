"""Nouns of weights: which box of which checkpoint tensor lands in which box of which parameter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

Shape = tuple[int, ...]

#: dtypes that become one another by a cast; quantised floats (float8) mean nothing without scales
CASTABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})


@dataclass(frozen=True, slots=True)
class Box:
    """A half-open axis-aligned box of element coordinates: ``starts[i] <= x[i] < stops[i]``."""

    starts: Shape
    stops: Shape

    def __post_init__(self) -> None:
        if len(self.starts) != len(self.stops) or any(
            a < 0 or b < a for a, b in zip(self.starts, self.stops, strict=True)
        ):
            raise ValueError(f"not a box: starts {self.starts}, stops {self.stops}")

    @classmethod
    def full(cls, shape: Shape) -> Box:
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> Shape:
        return tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(a, b) for a, b in zip(self.starts, self.stops, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common box, or None when it is empty."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return Box(starts, stops) if all(map(int.__lt__, starts, stops)) else None

    def shifted(self, by: Shape) -> Box:
        return Box(
            tuple(a + d for a, d in zip(self.starts, by, strict=True)),
            tuple(b + d for b, d in zip(self.stops, by, strict=True)),
        )

    def fits(self, shape: Shape) -> bool:
        return len(shape) == len(self.stops) and all(map(int.__le__, self.stops, shape))


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Name, dtype and shape of one checkpoint tensor, without its values."""

    name: str
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
    """A tensor that is read box by box: ``read(box)`` returns exactly that box's values."""

    shape: Shape
    dtype: torch.dtype
    read: Callable[[Box], Tensor]


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


WeightValue = Tensor | LazyTensor | SparsePatch | TensorPiece


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """``param[put] <- source[take]``: one piece of one checkpoint tensor on this rank.

    ``take`` is in the coordinates of ``source`` (whose full shape is ``shape``), ``put`` in those
    of the logical parameter. Both hold the same number of elements in the same row-major order.
    """

    source: str
    shape: Shape
    take: Box
    param: str
    put: Box


class Layout(Protocol):
    """How a logical parameter lies in memory: a bijection between its elements and storage's.

    ``shape`` is always the logical shape. Every method works on boxes or flat row-major positions
    of the logical parameter and touches only those elements, in place.
    """

    name: str

    def storage_shape(self, shape: Shape) -> Shape: ...

    def write(self, storage: Tensor, shape: Shape, box: Box, value: Tensor) -> None: ...

    def places(self, shape: Shape, positions: Tensor) -> Tensor:
        """Where flat logical positions lie in the flattened storage; int64, of equal shape."""
        ...

    def read(self, storage: Tensor, shape: Shape, box: Box) -> Tensor: ...

    def view(
        self, storage: Tensor, shape: Shape, box: Box, whole: Shape, take: Box
    ) -> tuple[Tensor, Shape, Box]:
        """The elements of ``box`` for a reader who wants no copy: (values, whole, take).

        ``take``, of ``whole``, says where they lie elsewhere. Both come back in the dimensions of
        the values, which may be finer than the given ones and keep every flat position.
        """
        ...


class PlainLayout:
    """The identity: storage is the row-major logical parameter."""

    name = "plain"

    def storage_shape(self, shape: Shape) -> Shape:
        return shape

    def write(self, storage: Tensor, shape: Shape, box: Box, value: Tensor) -> None:
        storage[box.slices].copy_(value.reshape(box.shape))

    def places(self, shape: Shape, positions: Tensor) -> Tensor:
        return positions

    def read(self, storage: Tensor, shape: Shape, box: Box) -> Tensor:
        return storage[box.slices]

    def view(
        self, storage: Tensor, shape: Shape, box: Box, whole: Shape, take: Box
    ) -> tuple[Tensor, Shape, Box]:
        return storage[box.slices].reshape(take.shape), whole, take


class TileLayout:
    """Tiles of ``rows`` output rows by pairs of inputs, as dot-product instructions read them.

    Logical ``[N, K]`` (N a multiple of ``rows``, K even) is stored as ``[N/rows, K/2, rows, 2]``:
    element (n, k) lies at ``[n // rows, k // 2, n % rows, k % 2]``.
    """

    name = "tiles"

    def __init__(self, rows: int = 16) -> None:
        self.rows = rows

    def storage_shape(self, shape: Shape) -> Shape:
        n, k = shape
        if n % self.rows or k % 2:
            raise ValueError(f"shape {shape} does not divide into tiles of {self.rows} x 2")
        return (n // self.rows, k // 2, self.rows, 2)

    def is_of_whole_tiles(self, box: Box) -> bool:
        """Whether the box cuts no block of rows and no pair."""
        return not any(n % self.rows or k % 2 for n, k in (box.starts, box.stops))

    def _logical(self, storage: Tensor) -> Tensor:
        """``storage`` seen as [N/rows, rows, K/2, 2] without a copy."""
        return storage.permute(0, 2, 1, 3)

    def _pairs(self, storage: Tensor) -> Tensor:
        """``storage`` seen as [N/rows, rows, K/2], each pair one integer: copies 3 times faster."""
        return storage.view(_PAIR[storage.dtype.itemsize]).squeeze(-1).transpose(1, 2)

    def write(self, storage: Tensor, shape: Shape, box: Box, value: Tensor) -> None:
        if not box.numel:
            return
        value = value.reshape(box.shape)
        (n0, k0), (n1, k1) = box.starts, box.stops
        if self.is_of_whole_tiles(box):
            pairs = self._pairs(storage)[n0 // self.rows : n1 // self.rows, :, k0 // 2 : k1 // 2]
            pairs.copy_(_as_pairs(value.to(storage.dtype)).reshape(pairs.shape))
            return
        low, high = -(-n0 // self.rows) * self.rows, n1 // self.rows * self.rows
        if low < high and not (k0 % 2 or k1 % 2):
            # Whole tiles at once, and the ragged rows above and below them.
            for a, b in ((n0, low), (low, high), (high, n1)):
                if a < b:
                    self.write(storage, shape, Box((a, k0), (b, k1)), value[a - n0 : b - n0])
            return
        view = self._logical(storage)
        # A box that cuts a tile: the few elements are placed one by one.
        rows = torch.arange(n0, n1, device=storage.device)[:, None]
        cols = torch.arange(k0, k1, device=storage.device)[None, :]
        view[rows // self.rows, rows % self.rows, cols // 2, cols % 2] = value.to(storage.dtype)

    def places(self, shape: Shape, positions: Tensor) -> Tensor:
        rows, columns = self.rows, shape[1]
        n = positions // columns
        k = positions - n * columns
        return (n // rows * columns + (k & ~1)) * rows + n % rows * 2 + (k & 1)

    def read(self, storage: Tensor, shape: Shape, box: Box) -> Tensor:
        if not box.numel:
            return storage.new_empty(box.shape)
        (n0, k0), (n1, k1) = box.starts, box.stops
        first, last = n0 // self.rows, -(-n1 // self.rows)
        pairs = slice(k0 // 2, -(-k1 // 2))
        part = self._logical(storage)[first:last, :, pairs]
        flat = part.reshape((last - first) * self.rows, 2 * part.shape[2])
        row, col = n0 - first * self.rows, k0 - pairs.start * 2
        return flat[row : row + n1 - n0, col : col + k1 - k0]

    def view(
        self, storage: Tensor, shape: Shape, box: Box, whole: Shape, take: Box
    ) -> tuple[Tensor, Shape, Box]:
        edges = (*box.starts, *box.stops, *take.starts, *take.stops)
        units = (self.rows, 2) * 4
        if len(whole) != 2 or whole[1] % 2 or any(e % u for e, u in zip(edges, units, strict=True)):
            return self.read(storage, shape, box).reshape(take.shape), whole, take
        (n0, k0), (n1, k1) = box.starts, box.stops
        values = self._logical(storage)[n0 // self.rows : n1 // self.rows, :, k0 // 2 : k1 // 2]
        (n0, k0), (n1, k1) = take.starts, take.stops
        finer = Box((n0 // self.rows, 0, k0 // 2, 0), (n1 // self.rows, self.rows, k1 // 2, 2))
        return values, (-(-whole[0] // self.rows), self.rows, whole[1] // 2, 2), finer


PLAIN = PlainLayout()

_PAIR = {1: torch.int16, 2: torch.int32, 4: torch.int64}  # bytes of an element -> dtype of two


def _as_pairs(value: Tensor) -> Tensor:
    """[n, k], k even -> [n, k/2] of integers with the same bits."""
    value = value.contiguous()
    if value.data_ptr() % (2 * value.element_size()) or value.storage_offset() % 2:
        value = value.clone()
    return value.view(_PAIR[value.element_size()])


@dataclass(frozen=True, slots=True)
class RankReceipt:
    """What one rank of the engine holds since the commit of ``version``.

    Read of its memory, through the layouts: before the vote where the commit moves no byte (the two
    instances change places, or the load went into the live one). Where a commit moves bytes
    (contents exchanged with host memory, or under captured graphs) all ranks are read again inside
    it, before a step runs, and it is taken back unless they hold the same.
    """

    rank: int
    version: int
    digest: int  # of everything this rank holds, 64 bits
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReceipt:
    """Proof of one committed update; equal on every trainer rank.

    ``digest`` is the sum over tensors of their 64-bit digests, of the trainer's values in the
    engine's dtype; the commit was refused unless every rank held exactly that. ``num_bytes``
    counts the tensors once, ``wire_bytes`` what left the sender.

    ``timings``, all in seconds; they overlap, as the parts of an update do. By the sender's clock:
    gather, in the source, and transfer, in handing buckets over and waiting for them. By the
    engine's: stage, the slowest rank's loading; verify, the vote with its digests; commit, from
    asking for it to its end; stall, in which no step could run; total, from the lease to the end of
    the commit. Of a rollback: stall and total.
    """

    version: int
    epoch: int
    digest: int
    num_tensors: int
    num_bytes: int
    wire_bytes: int
    timings: Mapping[str, float]
    ranks: tuple[RankReceipt, ...]
    update_id: str = ""
    transport: str = ""
    label: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
