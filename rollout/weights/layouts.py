"""How a logical parameter lies in memory."""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch
from torch import Tensor

from rollout.weights.box import Box, Shape
from rollout.weights.slots import INTEGERS


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
    """Tiles of ``rows`` output rows by ``inputs`` inputs, as dot-product instructions read them.

    Logical ``[N, K]`` (N a multiple of ``rows``, K of ``inputs``) is stored as
    ``[N/rows, K/inputs, rows, inputs]``: element (n, k) lies at
    ``[n // rows, k // inputs, n % rows, k % inputs]``. Pairs are for bfloat16, fours for int8.
    """

    name = "tiles"

    def __init__(self, rows: int = 16, inputs: int = 2) -> None:
        self.rows, self.inputs = rows, inputs

    def storage_shape(self, shape: Shape) -> Shape:
        n, k = shape
        if n % self.rows or k % self.inputs:
            raise ValueError(
                f"shape {shape} does not divide into tiles of {self.rows} x {self.inputs}"
            )
        return (n // self.rows, k // self.inputs, self.rows, self.inputs)

    def is_of_whole_tiles(self, box: Box) -> bool:
        """Whether the box cuts no block of rows and no run of inputs."""
        return not any(n % self.rows or k % self.inputs for n, k in (box.starts, box.stops))

    def _logical(self, storage: Tensor) -> Tensor:
        """``storage`` seen as [N/rows, rows, K/inputs, inputs] without a copy."""
        return storage.permute(0, 2, 1, 3)

    def _words(self, storage: Tensor) -> Tensor:
        """``storage`` seen as [N/rows, rows, K/inputs], each run one integer: copies faster."""
        word = INTEGERS[storage.dtype.itemsize * self.inputs]
        return storage.view(word).squeeze(-1).transpose(1, 2)

    def write(self, storage: Tensor, shape: Shape, box: Box, value: Tensor) -> None:
        if not box.numel:
            return
        value = value.reshape(box.shape)
        each = self.inputs
        (n0, k0), (n1, k1) = box.starts, box.stops
        if self.is_of_whole_tiles(box):
            words = self._words(storage)
            words = words[n0 // self.rows : n1 // self.rows, :, k0 // each : k1 // each]
            words.copy_(_as_words(value.to(storage.dtype), each).reshape(words.shape))
            return
        low, high = -(-n0 // self.rows) * self.rows, n1 // self.rows * self.rows
        if low < high and not (k0 % each or k1 % each):
            # Whole tiles at once, and the ragged rows above and below them.
            for a, b in ((n0, low), (low, high), (high, n1)):
                if a < b:
                    self.write(storage, shape, Box((a, k0), (b, k1)), value[a - n0 : b - n0])
            return
        view = self._logical(storage)
        # A box that cuts a tile: the few elements are placed one by one.
        rows = torch.arange(n0, n1, device=storage.device)[:, None]
        cols = torch.arange(k0, k1, device=storage.device)[None, :]
        view[rows // self.rows, rows % self.rows, cols // each, cols % each] = value.to(
            storage.dtype
        )

    def places(self, shape: Shape, positions: Tensor) -> Tensor:
        rows, columns, each = self.rows, shape[1], self.inputs
        n = positions // columns
        k = positions - n * columns
        inner = k % each
        return (n // rows * columns + (k - inner)) * rows + n % rows * each + inner

    def read(self, storage: Tensor, shape: Shape, box: Box) -> Tensor:
        if not box.numel:
            return storage.new_empty(box.shape)
        each = self.inputs
        (n0, k0), (n1, k1) = box.starts, box.stops
        first, last = n0 // self.rows, -(-n1 // self.rows)
        runs = slice(k0 // each, -(-k1 // each))
        part = self._logical(storage)[first:last, :, runs]
        flat = part.reshape((last - first) * self.rows, each * part.shape[2])
        row, col = n0 - first * self.rows, k0 - runs.start * each
        return flat[row : row + n1 - n0, col : col + k1 - k0]

    def view(
        self, storage: Tensor, shape: Shape, box: Box, whole: Shape, take: Box
    ) -> tuple[Tensor, Shape, Box]:
        each = self.inputs
        edges = (*box.starts, *box.stops, *take.starts, *take.stops)
        units = (self.rows, each) * 4
        ragged = any(e % u for e, u in zip(edges, units, strict=False))
        if len(whole) != 2 or whole[1] % each or ragged:
            return self.read(storage, shape, box).reshape(take.shape), whole, take
        (n0, k0), (n1, k1) = box.starts, box.stops
        values = self._logical(storage)[
            n0 // self.rows : n1 // self.rows, :, k0 // each : k1 // each
        ]
        (n0, k0), (n1, k1) = take.starts, take.stops
        finer = Box(
            (n0 // self.rows, 0, k0 // each, 0), (n1 // self.rows, self.rows, k1 // each, each)
        )
        return values, (-(-whole[0] // self.rows), self.rows, whole[1] // each, each), finer


class TransposedLayout:
    """Logical ``[N, K]`` is stored as ``[K, N]``, ``[N, K, E]`` as ``[E, K, N]``."""

    name = "transposed"

    def storage_shape(self, shape: Shape) -> Shape:
        return shape[::-1]

    def write(self, storage: Tensor, shape: Shape, box: Box, value: Tensor) -> None:
        self.logical(storage)[box.slices].copy_(value.reshape(box.shape))

    def places(self, shape: Shape, positions: Tensor) -> Tensor:
        places, step = torch.zeros_like(positions), prod(shape)
        for size in reversed(shape):
            step //= size
            places += positions % size * step
            positions = positions // size
        return places

    def read(self, storage: Tensor, shape: Shape, box: Box) -> Tensor:
        return self.logical(storage)[box.slices]

    def view(
        self, storage: Tensor, shape: Shape, box: Box, whole: Shape, take: Box
    ) -> tuple[Tensor, Shape, Box]:
        return self.logical(storage)[box.slices].reshape(take.shape), whole, take

    def logical(self, storage: Tensor) -> Tensor:
        """``storage`` in the parameter's own dimensions."""
        return storage.permute(*range(storage.dim())[::-1])


PLAIN = PlainLayout()
TRANSPOSED = TransposedLayout()


def _as_words(value: Tensor, each: int) -> Tensor:
    """[n, k], k a multiple of ``each`` -> [n, k / each] of integers with the same bits."""
    value, size = value.contiguous(), value.element_size()
    if value.data_ptr() % (each * size) or value.storage_offset() % each:
        value = value.clone()
    return value.view(INTEGERS[each * size])
