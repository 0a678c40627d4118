"""How a logical parameter lies in memory."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from rollout.weights.box import Box, Shape


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
