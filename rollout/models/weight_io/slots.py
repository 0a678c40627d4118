"""Reads and writes of weight slots: from any kind of value, through layouts, in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rollout.errors import WeightMismatch
from rollout.kernels import (
    DigestedAs,
    copy_into_box,
    copy_regions,
    digest,
    scatter_indices,
)
from rollout.kernels.region_lines import LARGE
from rollout.kernels.region_table import RegionTables
from rollout.models.weight_io.patch_journal import PatchJournal
from rollout.models.weight_io.table import ParamSpec, WeightTable
from rollout.weights import (
    PLAIN,
    TRANSPOSED,
    Box,
    LazyTensor,
    SparsePatch,
    TensorPiece,
    WeightSlot,
    WeightValue,
)
from rollout.weights.positions import Kept, positions_in_whole, positions_inside

Regions = tuple[list[Tensor], list[DigestedAs]]


class SlotIO:
    """One rank's parameters, addressed in the coordinates of their sources.

    What is written is noted in ``journal``. ``tables``: what goes where on a device, between loads.
    """

    def __init__(
        self,
        table: WeightTable,
        storages: Mapping[str, Tensor],
        journal: PatchJournal | None = None,
        tables: RegionTables | None = None,
    ) -> None:
        self._table, self._storages, self._journal = table, storages, journal
        self._tables = tables or RegionTables()
        self._later: list[tuple[Tensor, Tensor]] | None = None  # (target, source) on a device

    @contextmanager
    def together(self) -> Iterator[None]:
        """What is written inside from a device's own memory, on a CPU what is small, is copied at
        the end, in few launches.

        The values have to stay as they are until then.
        """
        later = self._later = []
        try:
            yield
        finally:
            self._later = None
        if later:
            targets, sources = zip(*later, strict=True)
            self.copy(targets, sources)

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """In few launches; ``targets``: parts of parameters, as ``target`` gives them."""
        copy_regions(targets, sources, self._tables)

    def target(self, slot: WeightSlot, box: Box) -> Tensor | None:
        """What ``together`` copies ``box`` of the slot to, by one copy; None where it does not."""
        spec, storage = self._table.params[slot.param], self._storages[slot.param]
        put = _put_of(slot, box)
        if put is None or not self._goes_together(storage, spec, box.numel):
            return None
        into = storage if spec.layout is PLAIN else TRANSPOSED.logical(storage)
        return into[put.slices]

    @staticmethod
    def _goes_together(storage: Tensor, spec: ParamSpec, numel: int) -> bool:
        """Whether so many elements are copied beside others: on a CPU what is small."""
        if storage.device.type == "cpu":
            return spec.layout in (PLAIN, TRANSPOSED) and numel <= LARGE
        return spec.layout is PLAIN

    def write(self, slot: WeightSlot, value: WeightValue) -> int:
        """Write what ``value`` holds of ``slot``; returns the number of elements written.

        Touches nothing else; a ``LazyTensor`` is asked for exactly the slot's box.
        """
        if not slot.take.numel:
            return 0
        if isinstance(value, SparsePatch):
            if value.box is not None and slot.take.intersect(value.box) is None:
                return 0
            return self._patch(slot, value.positions, value.values)
        if isinstance(value, TensorPiece):
            common = slot.take.intersect(value.box)
            if common is None:
                return 0
            back = tuple(-start for start in value.box.starts)
            return self._write_box(slot, common, value.values[common.shifted(back).slices])
        return self._write_box(slot, slot.take, read_box(slot.source, value, slot.take))

    def read_box(self, slot: WeightSlot, box: Box) -> Tensor:
        """The values of ``box`` (inside the slot's take, source coordinates), shaped like it."""
        spec, storage = self._table.params[slot.param], self._storages[slot.param]
        if not box.numel:
            return storage.new_empty(box.shape)
        whole = spec.layout.read(storage, spec.shape, slot.put).reshape(slot.take.shape)
        return (
            whole
            if box == slot.take
            else whole[box.shifted(tuple(-start for start in slot.take.starts)).slices]
        )

    def digest(self, slot: WeightSlot, nonfinite: list[int] | None = None) -> int:
        """The digest of the slot's values as elements of its source, read where they lie.

        ``nonfinite``: where given, its one number grows by the values that are NaN or infinite.
        """
        if not slot.take.numel:
            return 0
        spec, storage = self._table.params[slot.param], self._storages[slot.param]
        values, shape, box = spec.layout.view(storage, spec.shape, slot.put, slot.shape, slot.take)
        return digest(values, shape, box, nonfinite)

    def regions(self, slots: Sequence[WeightSlot]) -> Regions:
        """Where the values of each slot lie, and what they are of its source."""
        values, places = [], []
        for slot in slots:
            spec, storage = self._table.params[slot.param], self._storages[slot.param]
            if slot.take.numel:
                seen = spec.layout.view(storage, spec.shape, slot.put, slot.shape, slot.take)
            else:
                seen = storage.new_empty(slot.take.shape), slot.shape, slot.take
            values.append(seen[0])
            places.append(DigestedAs(seen[1], seen[2], storage.dtype))
        return values, places

    def read_at(self, slot: WeightSlot, positions: Tensor) -> tuple[Kept, Tensor]:
        """Which of the source's ascending flat ``positions`` lie in the slot, and their values."""
        storage = self._storages[slot.param]
        kept, relative = positions_inside(slot.take, slot.shape, positions.to(storage.device))
        return kept, self.read_box(slot, slot.take).reshape(-1)[relative]

    def _write_box(self, slot: WeightSlot, box: Box, value: Tensor) -> int:
        spec, storage = self._table.params[slot.param], self._storages[slot.param]
        value = value.to(storage.device)
        if self._journal is not None:
            self._journal.note_whole(slot.param)
        if (put := _put_of(slot, box)) is not None:
            self._put(storage, spec, put, value)
        else:
            everything = torch.arange(box.numel, device=value.device)
            everything = positions_in_whole(everything, box, slot.shape)
            self._patch(slot, everything, value.reshape(-1))
        return box.numel

    def _put(self, storage: Tensor, spec: ParamSpec, put: Box, value: Tensor) -> None:
        if self._later is None or not self._goes_together(storage, spec, value.numel()):
            copy_into_box(storage, spec.shape, put, value, spec.layout)
        else:
            into = storage if spec.layout is PLAIN else TRANSPOSED.logical(storage)
            self._later.append((into[put.slices], value.reshape(put.shape)))

    def _patch(self, slot: WeightSlot, positions: Tensor, values: Tensor) -> int:
        spec, storage = self._table.params[slot.param], self._storages[slot.param]
        kept, places = scatter_indices(positions.to(storage.device), slot, spec.shape, spec.layout)
        if len(places):
            chosen = values.to(storage.device)[kept].to(storage.dtype)
            storage.view(-1).index_copy_(0, places, chosen)
            if self._journal is not None:
                self._journal.note(slot.param, places, storage.numel())
        return len(places)


def _put_of(slot: WeightSlot, box: Box) -> Box | None:
    """Where ``box`` of a slot's source goes; None where that is no box of the parameter, as for
    part of a slot that reshapes.
    """
    if box == slot.take:
        return slot.put
    lead = max(0, len(slot.put.starts) - len(slot.take.starts))
    if slot.put.shape != (1,) * lead + slot.take.shape:
        return None
    # The same shape, or one index of a stack of it.
    pairs = zip(slot.put.starts[lead:], slot.take.starts, strict=True)
    put = box.shifted(tuple(to - start for to, start in pairs))
    return Box((*slot.put.starts[:lead], *put.starts), (*slot.put.stops[:lead], *put.stops))


def read_box(name: str, value: Tensor | LazyTensor, box: Box) -> Tensor:
    """``value[box]``, reading no more than that of a lazy one."""
    if isinstance(value, Tensor):
        return value.detach()[box.slices]
    part = value.read(box)
    if tuple(part.shape) != box.shape:
        raise WeightMismatch(
            f"{name}: its reader returned shape {tuple(part.shape)} for box {box.shape}"
        )
    return part
