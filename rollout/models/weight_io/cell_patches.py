"""Changed cells of quantised parameters: quantised anew where they lie, the rest stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rollout.kernels import digest_cells, quantize
from rollout.models.weight_io.patch_journal import PatchJournal
from rollout.models.weight_io.table import SCALE, WeightTable
from rollout.weights import PLAIN, CellPatch, Layout, Shape, WeightSlot
from rollout.weights.cells import CellGrid

_CHUNK = 1 << 20  # elements whose places are known at once


class CellPatches:
    """Writes patches of cells to one rank's quantised parameters, over what these hold.

    Of each slot's row of ``DIGESTS`` what was replaced is taken away (the sender says it of the
    floats; of codes and scales it is what lies there), and what is written is added: a code that
    had changed in memory is still seen, there or elsewhere.
    """

    def __init__(
        self,
        table: WeightTable,
        storages: Mapping[str, Tensor],
        dtype: torch.dtype,
        journal: PatchJournal | None,
    ) -> None:
        self._table, self._storages, self._dtype = table, storages, dtype
        self._journal = journal

    def fault(self, name: str, patch: CellPatch) -> str | None:
        """Why these cells of a tensor cannot be replaced, or None."""
        slots = self._table.slots.get(name, ())
        if not slots or any(slot not in self._table.quantized for slot in slots):
            return "is not quantised here: cells of it cannot be replaced"
        if tuple(patch.shape) != slots[0].shape:
            return f"has shape {slots[0].shape}, and cells of {tuple(patch.shape)} came"
        for slot in slots:
            cell = CellGrid.of(slot.shape, self._table.scheme(slot).cell(slot.shape)).cell
            came = tuple(patch.values.shape[1:])
            if (came, patch.dtype) != (cell, self._dtype):
                return f"has cells of {cell} in {self._dtype}; {came} in {patch.dtype} came"
            if self._table.sent_box(slot) != self._table.needs(slot):
                return "lies here in parts that cut its cells; send all of it (encoding='full')"
        return None

    def write(self, slot: WeightSlot, patch: CellPatch) -> int:
        """Take the cells that the slot needs; returns the number of elements taken."""
        if not slot.take.numel:
            return 0
        grid, box = CellGrid(slot.shape, *patch.values.shape[1:]), self._table.needs(slot)
        device = self._storages[slot.param].device
        corners = grid.corners(patch.numbers.to(device))
        low, high = (torch.tensor(edge, device=device) for edge in (box.starts, box.stops))
        kept = ((corners >= low) & (corners < high)).all(dim=1).nonzero().flatten()
        if not len(kept):
            return 0
        for part in torch.split(kept, max(1, _CHUNK // (grid.rows * grid.columns))):
            here = part.to(patch.values.device)
            values, replaced = patch.values[here].to(device), patch.replaced[here].to(device)
            self._replace(slot, grid, corners[part], values, replaced)
        if self._journal is not None:
            self._journal.note_whole(self._table.digests)
        return len(kept) * grid.rows * grid.columns

    def _replace(
        self, slot: WeightSlot, grid: CellGrid, corners: Tensor, values: Tensor, replaced: Tensor
    ) -> None:
        """Make and write the codes and scales of cells [n, rows, columns] at ``corners``."""
        scheme, (n, rows, columns) = self._table.scheme(slot), values.shape
        sent, bad = digest_cells(values, corners, slot.shape)
        if slot.shape[0] % rows or slot.shape[1] % columns:  # what else came is no part of a cell
            values = values.masked_fill(~grid.places(corners)[2], 0)
        # One below the other, each in rows of its own.
        alone = replace(scheme, rows=rows, columns=columns)
        codes, scales = quantize(values.view(n * rows, columns), alone)
        live = self._write_codes(slot, corners, codes.view(n, rows, -1))
        live += self._write_scales(slot, grid, corners, scales.view(n, rows, 1))
        row = self._storages[self._table.digests][self._table.quantized[slot]]
        row += torch.stack((sent.sum() - replaced.sum(), live, bad.sum())).to(row.device)

    def _write_codes(self, slot: WeightSlot, corners: Tensor, codes: Tensor) -> Tensor:
        """By how much that changes the digest of what is live."""
        scheme, spec = self._table.scheme(slot), self._table.params[slot.param]
        corners = corners // torch.tensor([1, scheme.per_byte], device=corners.device)
        (_, left), (_, right) = slot.take.starts, slot.take.stops
        edges = [edge // scheme.per_byte for edge in (slot.shape[1], left, right)]
        if not scheme.columns:  # of whole rows the rank keeps its own inputs
            codes = codes[:, :, edges[1] : edges[2]].contiguous()
            corners[:, 1] = edges[1]
        stored = (*spec.shape[:-1], spec.shape[-1] // scheme.per_byte)
        whole = (slot.shape[0], edges[0])
        shift = slot.put.starts[-1] // scheme.per_byte - edges[1]
        old = self._overwrite(slot, slot.param, spec.layout, stored, whole, shift, corners, codes)
        if not any(edge % 4 for edge in edges):  # as ``QuantizedIO`` digests them
            codes, old = (x.view(torch.int32) for x in (codes, old))
            corners = corners // torch.tensor([1, 4], device=corners.device)
            whole = (whole[0], whole[1] // 4)
        return _change(old, codes, corners, whole)

    def _write_scales(
        self, slot: WeightSlot, grid: CellGrid, corners: Tensor, scales: Tensor
    ) -> Tensor:
        scheme, shape = self._table.scheme(slot), self._table.params[slot.param].shape
        corners = corners // torch.tensor([1, grid.columns], device=corners.device)
        left = slot.take.starts[1]
        stored = (*shape[:-1], scheme.cells(shape[-2:]))
        whole, shift = (slot.shape[0], grid.across), -(left // grid.columns)
        name = slot.param + SCALE
        old = self._overwrite(slot, name, PLAIN, stored, whole, shift, corners, scales)
        if left % grid.columns:  # the rank that has the cells' first columns counts their scales
            return scales.new_zeros((), dtype=torch.int64)
        return _change(old, scales, corners, whole)

    def _overwrite(
        self, slot: WeightSlot, param: str, layout: Layout, stored: Shape, whole: Shape,
        shift: int, corners: Tensor, values: Tensor,
    ) -> Tensor:  # fmt: skip
        """Write cells of a matrix ``whole`` to a parameter of shape ``stored``, ``shift`` columns
        on; returns what was there.
        """
        row, column, inside = CellGrid(whole, *values.shape[1:]).places(corners)
        above = 0  # rows of a stack that lie before the slot's own
        for start, size in zip(slot.put.starts[:-1], (*stored[1:-1], 1), strict=True):
            above = (above + start) * size
        flat = (row + (above - slot.take.starts[0])) * stored[-1] + (column + shift)
        storage = self._storages[param].view(-1)
        places = layout.places(stored, flat[inside])
        old = torch.zeros_like(values)
        old[inside] = storage[places]
        storage[places] = values[inside]
        if self._journal is not None:
            self._journal.note(param, places, storage.numel())
        return old


def _change(old: Tensor, new: Tensor, corners: Tensor, shape: Shape) -> Tensor:
    """From the digest of some cells to that of others in their place; int64, which wraps."""
    sums = (digest_cells(cells, corners, shape)[0].sum() for cells in (new, old))
    return next(sums) - next(sums)
