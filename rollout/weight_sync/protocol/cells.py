"""Changes of a tensor that the engine holds quantised: the cells that changed, whole.

A scale is made of all of its cell, so a change of one element needs the others, too. An entry's
payload:

    values    count x rows x columns x dtype; what lies beyond the tensor's edge is zero
    | 0..7 bytes |
    replaced  count x 8 bytes, little-endian: the digest of what each cell held before
    gaps      of the cells' numbers, row-major among all cells, as ``delta`` codes positions

or that as one zstd frame. The engine holds a digest of the floats that its codes were made from,
and not these floats: with ``replaced`` it takes from it what is there no more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.kernels import decode_gaps, diff_update, digest_cells, encode_gaps
from rollout.kernels.gap_codes import WIDTHS
from rollout.weight_sync.protocol.delta import CodedDelta, fit_gaps, inflated, joined
from rollout.weight_sync.protocol.messages import NO_CELL, BucketEntry
from rollout.weights import Box, CellPatch
from rollout.weights.cells import CellGrid

_DIGEST = 8  # bytes


@dataclass(frozen=True, slots=True)
class EncodedCells:
    """The changed cells of one tensor, ready to be packed."""

    grid: CellGrid
    values: Tensor  # [n, rows, columns], in the tensor's dtype
    replaced: Tensor  # [n] int64
    codes: Tensor  # uint8, the coded gaps
    width: int

    @property
    def nbytes(self) -> int:
        return _offset(self.values.numel(), self.values.dtype) + self._rest

    @property
    def _rest(self) -> int:
        return _DIGEST * len(self.replaced) + len(self.codes)

    def coded(self, *, compress: bool = False) -> CodedDelta:
        dtype, shape = self.values.dtype, self.grid.shape
        rest = torch.cat([self.replaced.view(torch.uint8), self.codes.to(self.replaced.device)])
        flat, start = self.values.view(-1), _offset(self.values.numel(), dtype)
        data, before = joined(flat, start, rest.to(flat.device), compress=compress)
        return CodedDelta(
            dtype, shape, Box.full(shape), len(self.values), self.width, data, before,
            self.grid.cell if len(self.values) else NO_CELL,
        )  # fmt: skip


def encode_cells(
    copy: Tensor, new: Tensor, cell: tuple[int, int], max_bytes: int
) -> EncodedCells | None:
    """The cells that turn ``copy`` [N, K] into ``new``, which has then been done to it.

    None where they take more than ``max_bytes`` or are no shorter than ``new``, and where a cell
    held what is no number. Both contiguous, ``copy`` in host memory; peak extra memory: as much as
    ``new``, and some 24 bytes per changed element.
    """
    grid, size = CellGrid(tuple(new.shape), *cell), new.dtype.itemsize
    limit = min(max_bytes, new.numel() * size - 1)
    changes = diff_update(copy.to(new.device, copy=True), new, limit // size)
    if changes is None:
        copy.copy_(new)
        return None
    positions, values = changes
    numbers, found = grid.holding(positions), None
    if len(numbers) * (grid.rows * grid.columns * size + _DIGEST + 1) <= limit:
        before = grid.gather(copy, numbers.cpu())
        replaced, bad = digest_cells(before, grid.corners(numbers.cpu()), grid.shape)
        if not bool(bad.any()):
            codes, width = encode_gaps(numbers)
            found = EncodedCells(grid, grid.gather(new, numbers), replaced, codes, width)
    copy.view(-1)[positions.cpu()] = values.cpu()
    return found if found is not None and found.nbytes <= limit else None


def decode_cells(entry: BucketEntry, raw: Tensor) -> CellPatch:
    """The patch in an entry's bytes ``raw`` (uint8 [entry.nbytes], aligned).

    Raises ``TransferFailed`` unless exactly ``entry.count`` ascending cells lie inside the tensor.
    """
    grid, (rows, columns) = CellGrid(entry.shape, *entry.cell), entry.cell
    numel = entry.count * rows * columns
    raw, start = inflated(entry, raw, numel), _offset(numel, entry.dtype)
    behind = start + _DIGEST * entry.count
    numbers = decode_gaps(raw[behind:], entry.sparse, entry.count, grid.count)
    if numbers is None:
        raise TransferFailed(
            f"delta of {entry.name!r:.200}: its gaps are not those of {entry.count} cells of "
            f"{grid.count}"
        )
    values = raw[: numel * entry.dtype.itemsize].view(entry.dtype).view(-1, rows, columns)
    replaced = raw[start:behind].view(torch.int64)
    return CellPatch(entry.shape, entry.dtype, numbers, values, replaced)


def problem_of_cells(entry: BucketEntry) -> str | None:
    """What is wrong with the sizes that an entry of cells announces, or None."""
    shape, cell = entry.shape, entry.cell
    if len(shape) != 2 or entry.box != Box.full(shape):
        return f"cells of {entry.box} of shape {shape}; known are those of a whole matrix"
    if any(not 0 < some <= size for some, size in zip(cell, shape, strict=True)):
        return f"cells of {cell} in shape {shape}"
    grid = CellGrid(shape, *cell)
    if entry.sparse not in WIDTHS or not 0 < entry.count <= grid.count:
        return f"{entry.count} of {grid.count} cells, gaps of {entry.sparse} bytes"
    if entry.inflated and entry.nbytes >= entry.inflated:
        return f"{entry.nbytes} bytes that are said to be {entry.inflated} compressed"
    nbytes = entry.inflated or entry.nbytes
    behind = _offset(entry.count * cell[0] * cell[1], entry.dtype) + _DIGEST * entry.count
    if not fit_gaps(entry, nbytes - behind, grid.count):
        return f"{nbytes} bytes cannot hold {entry.count} cells of {cell}"
    return None


def _offset(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // _DIGEST) * _DIGEST
