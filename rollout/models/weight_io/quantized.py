"""Reads and writes of slots whose parameter is quantised: floats or codes come, codes are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.kernels import copy_into_box, digest, quantize
from rollout.models.weight_io.cell_patches import CellPatches
from rollout.models.weight_io.patch_journal import PatchJournal
from rollout.models.weight_io.slots import read_box
from rollout.models.weight_io.table import SCALE, WeightTable
from rollout.weights import (
    Box,
    LazyTensor,
    Shape,
    SparsePatch,
    TensorPiece,
    WeightSlot,
    WeightValue,
)
from rollout.weights.packed_rows import as_bytes, packed_boxes, packed_shape, unpack_rows
from rollout.weights.quantization import Scheme

BAND = 128  # rows that wait together for what is missing of them; of whole cells in every scheme
_SIGN = 1 << 63


@dataclass(slots=True)
class _Sums:
    """What has been written of a slot: digests of what was sent and of what was made of it."""

    sent: int = 0
    live: int = 0
    nonfinite: int = 0


@dataclass(frozen=True, slots=True)
class _Band:
    """Rows of which parts have come. Rows that come whole never wait, so a band may have gaps."""

    box: Box
    values: Tensor
    edges: NDArray[np.int64]  # where its rows of cells begin, and where the last one ends
    whole: NDArray[np.int64]  # elements of each
    missing: NDArray[np.int64]  # how many of these have yet to come


@dataclass(frozen=True, slots=True)
class _Form:
    """What comes of a slot's source: of ``whole``, in ``dtype``; ``take`` takes some of it, of
    whole rows of cells, ``rows`` each.
    """

    slot: WeightSlot
    whole: Box
    rows: int
    dtype: torch.dtype
    take: Callable[[WeightSlot, Box, Tensor], None]


class QuantizedIO:
    """One rank's quantised parameters, addressed in the coordinates of their sources.

    Floats are quantised; codes and scales in the parameter's own grid, from a file or in bytes
    (``packed_rows``), are kept as they are; changed cells go through ``cells``. A cell (what shares
    a scale) is taken when all of it has come, wherever the ranks cut it: pieces that hold whole
    rows of cells at once, others wait in bands of ``BAND`` rows, in ``dtype``, of at most
    ``table.pending`` elements. With the codes goes a row of the digests for each slot: the digest
    of what was sent, in ``dtype`` or in bytes, that of codes and scales, and how many values were
    not finite. So ``digest`` can say of what is in memory what it was made from.
    """

    def __init__(
        self,
        table: WeightTable,
        storages: Mapping[str, Tensor],
        dtype: torch.dtype,
        journal: PatchJournal | None = None,
    ) -> None:
        self._table, self._storages, self._dtype = table, storages, dtype
        self._journal = journal
        self.cells = CellPatches(table, storages, dtype, journal)
        self._sums: dict[WeightSlot, _Sums] = {}
        self._bands: dict[tuple[WeightSlot, int], _Band] = {}  # by their first row
        self._pending = 0  # bytes of them

    def write(self, slot: WeightSlot, value: WeightValue) -> int:
        """Take what ``value`` holds of the slot's cells; returns the number of elements taken."""
        if not slot.take.numel:
            return 0
        if isinstance(value, SparsePatch):
            if not len(value.positions):
                return 0
            raise WeightMismatch(
                f"{slot.source}: single elements of a quantised weight cannot change; send the "
                "cells that share a scale, or all of it (encoding='full')"
            )
        if isinstance(value, LazyTensor) and self._copy_codes(slot, value):
            return slot.take.numel
        form = self.form(slot, in_bytes=tuple(value.shape) != slot.shape)
        box = form.whole
        if isinstance(value, TensorPiece):
            common = box.intersect(value.box)
            if common is None:
                return 0
            back = tuple(-start for start in value.box.starts)
            part = value.values[common.shifted(back).slices]
            box = common
        else:
            part = read_box(slot.source, value, box)
        self._take(form, box, part.detach().to(form.dtype))
        if form.dtype == torch.uint8:
            return slot.take.numel * box.numel // form.whole.numel
        own = slot.take.intersect(box)
        return 0 if own is None else own.numel

    def form(self, slot: WeightSlot, *, in_bytes: bool) -> _Form:
        """What is taken of floats, or of codes and scales in bytes."""
        needs, scheme = self._table.needs(slot), self._table.scheme(slot)
        if not in_bytes:
            return _Form(slot, needs, scheme.rows, self._dtype, self._quantize)
        width = packed_shape(slot.shape, scheme)[1]
        whole = Box((needs.starts[0], 0), (needs.stops[0], width))
        return _Form(slot, whole, 1, torch.uint8, self._unpack)

    def digest(self, slot: WeightSlot, nonfinite: list[int] | None = None) -> int:
        """The digest of what the slot was made from: of ``table.sent_box``.

        Where codes or scales have other bits than were written, it is another number.
        """
        if not slot.take.numel:
            return 0
        sent, live, bad = self._recorded(slot).tolist()
        if nonfinite is not None:
            nonfinite[0] += bad
        now = self.live_digest(slot)
        return int(sent % 2**64 if now == live % 2**64 else now)

    def live_digest(self, slot: WeightSlot) -> int:
        """The digest of the slot's codes and scales; those of all ranks' slots add up."""
        if not slot.take.numel:
            return 0
        scheme, spec = self._table.scheme(slot), self._table.params[slot.param]
        storage, put = self._storages[slot.param], _in_bytes(slot.put, scheme)
        stored = (*spec.shape[:-1], spec.shape[-1] // scheme.per_byte)
        scales = self._storages[slot.param + SCALE][slot.put.slices[:-1]]
        scales = scales.reshape(put.shape[-2], -1)
        if spec.layout.name == "tiles":
            values, whole, box = spec.layout.view(storage, stored, put, slot.shape, slot.take)
        if spec.layout.name == "tiles" and values.dim() == 4:  # whole ones: read where they lie
            words = values.view(torch.int32)
            (*starts, _), (*stops, _) = box.starts, box.stops
            found = digest(words, (*whole[:3], 1), Box((*starts, 0), (*stops, 1)))
            return (found + self._of_scales(slot, slot.take, scales)) % 2**64
        codes = spec.layout.read(storage, stored, put).reshape(put.shape[-2:])
        return self._live(slot, slot.take, codes, scales)

    def recorded(self, slot: WeightSlot) -> int:
        """What ``live_digest`` was when the slot was written."""
        return int(self._recorded(slot)[1]) % 2**64 if slot.take.numel else 0

    def read(self, slot: WeightSlot) -> Tensor:
        """The values that a slot's codes stand for, shaped like its take."""
        scheme, spec = self._table.scheme(slot), self._table.params[slot.param]
        storage = self._storages[slot.param]
        if not slot.take.numel:
            return torch.empty(slot.take.shape, dtype=self._dtype, device=storage.device)
        put = _in_bytes(slot.put, scheme)
        stored = (*spec.shape[:-1], spec.shape[-1] // scheme.per_byte)
        codes = spec.layout.read(storage, stored, put).reshape(put.shape[-2:])
        scales = self._storages[slot.param + SCALE][slot.put.slices[:-1]]
        return scheme.dequantize(codes, scales.reshape(put.shape[-2], -1), self._dtype)

    def _copy_codes(self, slot: WeightSlot, value: LazyTensor) -> bool:
        """Keep the codes of a file, if it has some in the slot's grid."""
        scheme, device = self._table.scheme(slot), self._storages[slot.param].device
        for found in value.codes:
            if found.scheme is scheme:
                box = self._table.needs(slot)
                codes, scales = found.read(box)
                self._keep(slot, box, codes.to(device), scales.to(device))
                return True
        return False

    def _take(self, form: _Form, box: Box, values: Tensor) -> None:
        """Take the whole cells of ``box``; the rest waits."""
        whole, rows, slot = form.whole, form.rows, form.slot
        (n0, k0), (n1, k1) = box.starts, box.stops
        low = high = n1
        if (k0, k1) == (whole.starts[1], whole.stops[1]):
            low = min(n1, -(-n0 // rows) * rows)
            high = n1 if n1 == whole.stops[0] else max(low, n1 // rows * rows)
        if low < high:
            form.take(slot, Box((low, k0), (high, k1)), values[low - n0 : high - n0])
        for a, b in ((n0, low), (high, n1)):
            for start in range(a // BAND * BAND, b, BAND):
                x, z = max(a, start), min(b, start + BAND)
                if x < z:
                    self._wait(form, start, Box((x, k0), (z, k1)), values[x - n0 : z - n0])

    def _wait(self, form: _Form, start: int, box: Box, values: Tensor) -> None:
        """Keep a part of a band; take the rows of cells of which nothing is missing now."""
        slot = form.slot
        band = self._bands.get((slot, start)) or self._open_band(form, start, values.device)
        (n0, k0), (_, k1) = band.box.starts, band.box.stops
        (a, _), (z, _) = box.starts, box.stops
        band.values[box.shifted((-n0, -k0)).slices] = values
        rows = np.clip(band.edges[1:], a, z) - np.clip(band.edges[:-1], a, z)
        np.subtract(band.missing, rows * (box.stops[1] - box.starts[1]), out=band.missing)
        complete = band.missing <= 0
        band.missing[complete] = band.whole[complete]  # as if nothing of it had come
        for first, end in _runs(complete):
            low, high = int(band.edges[first]), int(band.edges[end])
            form.take(slot, Box((low, k0), (high, k1)), band.values[low - n0 : high - n0])
        if (band.missing == band.whole).all():
            del self._bands[slot, start]
            self._pending -= band.values.nbytes

    def _open_band(self, form: _Form, start: int, device: torch.device) -> _Band:
        whole, slot = form.whole, form.slot
        (n0, k0), (n1, k1) = whole.starts, whole.stops
        box = Box((max(n0, start), k0), (min(n1, start + BAND), k1))
        values = torch.empty(box.shape, dtype=form.dtype, device=device)
        room = self._table.pending * self._dtype.itemsize
        if self._pending + values.nbytes > room:
            raise WeightMismatch(
                f"{slot.source}: {self._pending + values.nbytes >> 20} MiB of pieces wait for the "
                f"rest of their scales' blocks, and {room >> 20} were set aside; send "
                "the pieces of a tensor one after the other, or another transport"
            )
        self._pending += values.nbytes
        step = form.rows
        inner = range(box.starts[0] // step * step + step, box.stops[0], step)
        edges = np.array([box.starts[0], *inner, box.stops[0]])
        elements = np.diff(edges) * (k1 - k0)
        band = self._bands[slot, start] = _Band(box, values, edges, elements, elements.copy())
        return band

    def _quantize(self, slot: WeightSlot, box: Box, values: Tensor) -> None:
        """Make and write the codes and scales of ``box``, which is of whole cells."""
        if slot.take.intersect(box) is None:
            return
        scheme, device = self._table.scheme(slot), self._storages[slot.param].device
        own, codes, scales = self._write(slot, box, *quantize(values.to(device), scheme))
        sent = self._table.sent_box(slot).intersect(box)
        assert sent is not None
        part, bad = values[sent.shifted(tuple(-start for start in box.starts)).slices], [0]
        self._note(slot, own, codes, scales, digest(part, slot.shape, sent, bad), bad[0])

    def _unpack(self, slot: WeightSlot, box: Box, rows: Tensor) -> None:
        """Write codes and scales that come in bytes; ``box``: of those."""
        needs, scheme = self._table.needs(slot), self._table.scheme(slot)
        device = self._storages[slot.param].device
        codes, scales = unpack_rows(rows.to(device), slot.shape, scheme)
        (_, k0), (_, k1) = needs.starts, needs.stops
        part = Box((box.starts[0], k0), (box.stops[0], k1))
        columns = scheme.cell(slot.shape)[1]
        cells = slice(k0 // columns, -(-k1 // columns))
        inside = slice(k0 // scheme.per_byte, k1 // scheme.per_byte)
        self._keep(slot, part, codes[:, inside], scales[:, cells])

    def _keep(self, slot: WeightSlot, box: Box, codes: Tensor, scales: Tensor) -> None:
        """Write codes and scales of ``box``, whole rows of cells or some of their rows, as they
        are."""
        if slot.take.intersect(box) is None:
            return
        scheme = self._table.scheme(slot)
        own, codes_here, scales_here = self._write(slot, box, codes, scales)
        sent = self._table.sent_box(slot).intersect(box)
        assert sent is not None
        codes, scales = _part_of(scheme, slot.shape, box, sent, codes, scales)
        whole, found = packed_shape(slot.shape, scheme), 0
        pair = (codes.view(torch.uint8), as_bytes(scales))
        for values, at in zip(pair, packed_boxes(slot.shape, scheme, sent), strict=True):
            found += digest(values, whole, at)
        bad = scheme.nonfinite(codes, scales)
        self._note(slot, own, codes_here, scales_here, found, bad)

    def _write(
        self, slot: WeightSlot, box: Box, codes: Tensor, scales: Tensor
    ) -> tuple[Box, Tensor, Tensor]:
        """Write the rank's own of ``box``: which it is, and its codes and scales."""
        own, scheme = slot.take.intersect(box), self._table.scheme(slot)
        assert own is not None
        storage, spec = self._storages[slot.param], self._table.params[slot.param]
        codes, scales = _part_of(scheme, slot.shape, box, own, codes, scales)
        lead = len(slot.put.starts) - 2
        to = own.shifted(
            tuple(p - t for p, t in zip(slot.put.starts[lead:], slot.take.starts, strict=True))
        )
        put = Box((*slot.put.starts[:lead], *to.starts), (*slot.put.stops[:lead], *to.stops))
        stored = (*spec.shape[:-1], spec.shape[-1] // scheme.per_byte)
        copy_into_box(storage, stored, _in_bytes(put, scheme), codes, spec.layout)
        into = self._storages[slot.param + SCALE][put.slices[:-1]]
        into.copy_(scales.reshape(into.shape))
        if self._journal is not None:
            for name in self._table.params_of(slot):
                self._journal.note_whole(name)
        return own, codes, scales

    def _note(
        self, slot: WeightSlot, own: Box, codes: Tensor, scales: Tensor, sent: int, nonfinite: int
    ) -> None:
        """Add up what was sent, and what was written of the rank's ``own``."""
        sums = self._sums.setdefault(slot, _Sums())
        sums.sent += sent
        sums.live += self._live(slot, own, codes, scales)
        sums.nonfinite += nonfinite
        row = [_signed(sums.sent), _signed(sums.live), sums.nonfinite]
        self._recorded(slot).copy_(torch.tensor(row))

    def _live(self, slot: WeightSlot, own: Box, codes: Tensor, scales: Tensor) -> int:
        """Of ``own``'s codes; of a scale on the rank alone that has its cell's first column."""
        scheme = self._table.scheme(slot)
        whole, at = (slot.shape[0], slot.shape[1] // scheme.per_byte), _in_bytes(own, scheme)
        edges = (whole[1], at.starts[1], at.stops[1])
        if not any(edge % 4 for edge in edges):  # four at a time
            codes = codes.contiguous()
            if codes.storage_offset() % 4:  # as a file's, which may begin at any byte
                codes = codes.clone()
            codes = codes.view(torch.int32)
            whole = whole[0], whole[1] // 4
            at = Box((at.starts[0], at.starts[1] // 4), (at.stops[0], at.stops[1] // 4))
        return (digest(codes, whole, at) + self._of_scales(slot, own, scales)) % 2**64

    def _of_scales(self, slot: WeightSlot, own: Box, scales: Tensor) -> int:
        scheme, found = self._table.scheme(slot), 0
        columns = scheme.cell(slot.shape)[1]
        if own.starts[1] % columns == 0:
            first = own.starts[1] // columns
            cells = Box((own.starts[0], first), (own.stops[0], first + scales.shape[1]))
            found = digest(scales, (slot.shape[0], scheme.cells(slot.shape)), cells)
        return found

    def _recorded(self, slot: WeightSlot) -> Tensor:
        return self._storages[self._table.digests][self._table.quantized[slot]]


def _part_of(
    scheme: Scheme, shape: Shape, box: Box, part: Box, codes: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """Of the codes and scales of ``box`` of a weight of ``shape`` those of ``part`` of it."""
    columns = scheme.cell(shape)[1]
    inside = part.shifted(tuple(-start for start in box.starts))
    first, last = part.starts[1] // columns, -(-part.stops[1] // columns)
    first, last = (c - box.starts[1] // columns for c in (first, last))
    return codes[_in_bytes(inside, scheme).slices], scales[inside.slices[0], first:last]


def _runs(flags: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """[first, end) of each run of neighbours that are set."""
    changes = np.flatnonzero(np.diff(flags.astype(np.int8), prepend=0, append=0))
    return [(int(first), int(end)) for first, end in changes.reshape(-1, 2)]


def _in_bytes(box: Box, scheme: Scheme) -> Box:
    """``box`` of elements as one of storage's."""
    if scheme.per_byte == 1:
        return box
    starts = (*box.starts[:-1], box.starts[-1] // scheme.per_byte)
    stops: Shape = (*box.stops[:-1], box.stops[-1] // scheme.per_byte)
    return Box(starts, stops)


def _signed(value: int) -> int:
    """The int64 with the bits of a sum modulo 2^64."""
    return (value % 2**64 ^ _SIGN) - _SIGN
