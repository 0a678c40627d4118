"""A streaming load of checkpoint tensors into one rank's parameters, in place."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rollout.errors import WeightMismatch, some
from rollout.kernels.region_table import RegionTables
from rollout.models.weight_io.alias_check import AliasCheck
from rollout.models.weight_io.patch_journal import PatchJournal
from rollout.models.weight_io.quantized import QuantizedIO
from rollout.models.weight_io.slots import SlotIO
from rollout.models.weight_io.table import WeightTable, first_overlap
from rollout.weights import (
    CASTABLE,
    Box,
    CellPatch,
    LazyTensor,
    Shape,
    SparsePatch,
    TensorPiece,
    WeightValue,
)
from rollout.weights.components import component_of, own_name
from rollout.weights.names import HEAD, is_idle_bias, nearest, placed, weight_dtype
from rollout.weights.spellings import Splitter

log = logging.getLogger(__name__)
NamedBox = tuple[str, Box | None]  # a tensor's name, and which box of it: None for the whole
HINTS = 16  # unknown names of one load whose nearest is searched for


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What a load did: file-form names; ``nbytes`` written on this rank, in the model's dtype."""

    loaded: frozenset[str]
    missing: frozenset[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Where values go, each of these shapes a tensor's, or a box's of it; ``targets``: as they lie
    in memory, ``takes``: of each the index of its value, the part of that which goes there, and the
    shape that it has there (None: all of it, and its own).
    """

    parts: tuple[NamedBox, ...]
    shapes: tuple[Shape, ...]
    targets: tuple[Tensor, ...]
    takes: tuple[tuple[int, tuple[slice, ...] | None, Shape | None], ...]
    params: tuple[str, ...]
    nbytes: int


class WeightLoad:
    """``feed`` any number of times, then ``finish`` once.

    A value is a full tensor, a ``LazyTensor`` (only this rank's boxes are read), a ``SparsePatch``
    (only its elements are overwritten), a ``CellPatch`` (of a quantised one, only these cells) or a
    ``TensorPiece`` (its box alone). Disjoint pieces, and patches of disjoint boxes, make a whole.
    Values may lie on another device and have any float dtype: each element is cast once.
    A tensor may come under another of the table's ``spellings``: it is split into file-form ones,
    and what is complete or sent twice is judged on those. Parameters are written in place and keep
    their addresses. An alias may be sent and must equal
    its owner bit for bit, in the model's dtype, on this rank's part.

    Every problem is remembered; one ``WeightMismatch`` has them all (``problems``), its text the
    first few. After it, the parameters hold a mixture: the caller discards this instance or loads
    it anew.
    """

    def __init__(
        self,
        table: WeightTable,
        storages: Mapping[str, Tensor],
        dtype: torch.dtype,
        after_load: Callable[[], None] = lambda: None,
        *,
        tables: RegionTables | None = None,
    ) -> None:
        self._table, self._dtype, self._after_load = table, dtype, after_load
        self.journal = PatchJournal()  # what has been written so far
        self._io = SlotIO(table, storages, self.journal, tables)
        self._quantized = QuantizedIO(table, storages, dtype, self.journal)
        self._aliases = AliasCheck(table, self._io)
        self._splitter = Splitter(table.spellings)
        self._seen: set[str] = set()
        self._in_bytes: set[str] = set()  # of quantised ones those whose codes came
        self._pieces: dict[str, dict[Box, None]] = {}
        self._problems: list[str] = []
        self._nbytes = 0

    def feed(
        self, items: Iterable[tuple[str, WeightValue | CellPatch]], *, together: bool = False
    ) -> None:
        """Write each item; consumes all of them, then raises if any was refused.

        ``together``: every value stays as it is until this returns, so that those on the device
        may be copied at once.
        """
        with self._io.together() if together else nullcontext():
            self._consume(items)
        self._raise_problems()

    def plan(self, parts: Sequence[NamedBox]) -> LoadPlan | None:
        """For ``feed_planned``, in this load and in later ones of the same table and storages, as
        long as those lie where they are.

        None where what comes under one of the names is more than a copy: it has another name here
        or is split, is quantised or an alias, or lies in tiles; or where one of them comes twice.
        """
        table = self._table
        if len({*parts}) != len(parts):
            return None
        shapes: list[Shape] = []
        targets: list[Tensor] = []
        takes: list[tuple[int, tuple[slice, ...] | None, Shape | None]] = []
        params: dict[str, None] = {}
        nbytes = 0
        for index, (name, box) in enumerate(parts):
            slots = table.slots.get(name)
            if not slots or name in table.aliases or placed(name, table.prefixes) != name:
                return None
            of = Box.full(slots[0].shape) if box is None else box
            shapes.append(of.shape)
            if table.spellings.respells(name, slots[0].shape):
                return None
            for slot in slots:
                if slot in table.quantized:
                    return None
                if (common := slot.take.intersect(of)) is None or not common.numel:
                    continue
                if (target := self._io.target(slot, common)) is None:
                    return None
                targets.append(target)
                back, shape = tuple(-start for start in of.starts), tuple(target.shape)
                part = None if common == of else common.shifted(back).slices
                takes.append((index, part, shape if shape != common.shape else None))
                params[slot.param] = None
                nbytes += common.numel * weight_dtype(name, self._dtype).itemsize
        return LoadPlan(
            *(tuple(parts), tuple(shapes), tuple(targets), tuple(takes), tuple(params), nbytes)
        )

    def feed_planned(self, plan: LoadPlan, values: Sequence[Tensor]) -> bool:
        """As ``feed`` of these values, at once; False where nothing was written, as something would
        be refused: ``feed`` says what.
        """
        if any(v.shape != shape for v, shape in zip(values, plan.shapes, strict=True)):
            return False
        if not {value.dtype for value in values} <= CASTABLE or self._has_some(plan):
            return False
        parts = (
            (values[i] if part is None else values[i][part], shape) for i, part, shape in plan.takes
        )
        sources = [part if shape is None else part.reshape(shape) for part, shape in parts]
        if sources:
            with torch.no_grad():
                self._io.copy(plan.targets, sources)
        for param in plan.params:
            self.journal.note_whole(param)
        for name, box in plan.parts:
            self._seen.add(name)
            if box is not None:
                self._pieces.setdefault(name, {})[box] = None
        self._nbytes += plan.nbytes
        return True

    def _has_some(self, plan: LoadPlan) -> bool:
        """Whether something that a plan is of has come already, in what it is of or otherwise."""
        return any(
            name in self._seen and (box is None or box in self._pieces.get(name, {box: None}))
            for name, box in plan.parts
        )

    def finish(
        self, *, partial: bool = False, components: Sequence[str] | None = None
    ) -> LoadReport:
        """Judge completeness, compare aliases, re-derive. ``partial`` allows whole tensors to miss,
        ``components`` those of components beside these of which nothing came.

        Raises ``WeightMismatch`` for missing tensors, incomplete pieces, differing aliases, and
        parts that were cut anew and whose others did not come.
        """
        self._problems.extend([*self._overlaps(), *self._splitter.left()])
        incomplete = {
            name for name, boxes in self._pieces.items() if not self._covered(name, boxes)
        }
        missing = set(self._table.slots) - self._seen
        if components is not None:
            sent = {*components, *map(component_of, self._seen)}
            missing = {name for name in missing if component_of(name) in sent}
        if partial:
            for name in sorted(incomplete):
                self._problems.append(f"{name}: its pieces do not cover what this rank holds")
        elif missing or incomplete:
            names = [repr(name) for name in sorted(missing | incomplete)]
            log.debug("not initialized from checkpoint: %s", names)
            said = f"Following weights were not initialized from checkpoint: {{{some(names)}}}"
            if {own_name(name) for name in missing} == {HEAD}:
                said += "; is tie_word_embeddings meant, which config.json would say?"
            self._problems.insert(0, said)  # it says most where there are many
        written = set(self._table.slots) if partial else self._seen
        self._problems.extend(self._aliases.differing(written - incomplete))
        self._raise_problems()
        self._after_load()
        return LoadReport(frozenset(self._seen), frozenset(missing), self._nbytes)

    def load_all(self, items: Iterable[tuple[str, WeightValue]]) -> LoadReport:
        """Feed and finish, with one error for the problems of both."""
        self._consume(items)
        return self.finish()

    def _consume(self, items: Iterable[tuple[str, WeightValue | CellPatch]]) -> None:
        with torch.no_grad():
            for sent, value in items:
                name = placed(sent, self._table.prefixes)
                if name is None:
                    continue
                if isinstance(value, CellPatch):
                    self._take_cells(name, value)
                elif self._table.spellings.respells(name, tuple(value.shape)):
                    self._take_spelled(name, value)
                else:
                    self._take(name, value)

    def _take_spelled(self, name: str, value: WeightValue) -> None:
        """Take every file-form part of ``value``; the problems of one tensor make one line."""
        before = len(self._problems)
        try:
            if isinstance(value, SparsePatch) and value.box is not None:
                raise WeightMismatch(f"{name}: changes of a part of it have to come unfused")
            for part, held in self._splitter.split(name, value):
                self._take(part, held)
        except WeightMismatch as error:
            self._problems.append(str(error))
        if found := self._problems[before:]:
            more = f" (and so on for {len(found) - 1} more of its parts)" if found[1:] else ""
            said = found[0] if name in found[0] else f"{name}: {found[0]}"
            self._problems[before:] = [f"{said}{more}"]

    def _take(self, name: str, value: WeightValue) -> None:
        is_alias = name in self._table.aliases
        if not is_alias and name not in self._table.slots:
            known = self._table.slots
            idle = isinstance(value, LazyTensor) and is_idle_bias(
                name, known, lambda: value.read(Box.full(value.shape))
            )
            if not idle and not self._table.ignores(name):
                self._problems.append(self._unknown(name))
            return
        fault = self._fault(name, value) or self._duplicate(name, value)
        if tuple(value.shape) != self._table.shape_of(name):
            self._in_bytes.add(name)
        if fault:
            self._problems.append(f"{name}: {fault}")
            return
        self._seen.add(name)
        if is_alias:
            self._aliases.add(name, value)
            return
        if isinstance(value, SparsePatch):
            self._aliases.note_patch(name, value)
        try:
            self._nbytes += self._write(name, value) * weight_dtype(name, self._dtype).itemsize
        except WeightMismatch as error:
            self._problems.append(str(error))

    def _take_cells(self, name: str, patch: CellPatch) -> None:
        cells = self._quantized.cells
        fault = cells.fault(name, patch) or ("was sent twice" if name in self._seen else None)
        if fault:
            self._problems.append(f"{name}: {fault}")
            return
        self._seen.add(name)
        written = sum(cells.write(slot, patch) for slot in self._table.slots[name])
        self._nbytes += written * self._dtype.itemsize

    def _write(self, name: str, value: WeightValue) -> int:
        """Put a checked value where it belongs; returns the number of elements written."""
        quantized = self._table.quantized
        return sum(
            (self._quantized if slot in quantized else self._io).write(slot, value)
            for slot in self._table.slots[name]
        )

    def _unknown(self, name: str) -> str:
        known = [*self._table.slots, *self._table.aliases, *self._table.spellings.names()]
        near = nearest(name, known) if len(self._problems) < HINTS else None
        hint = f"; the nearest known is {near!r}" if near else ""
        return f"unknown tensor {name!r}{hint}"

    def _fault(self, name: str, value: WeightValue) -> str | None:
        """What is wrong with a value by itself, or None."""
        shape = self._table.shape_of(name)
        in_bytes = value.dtype == torch.uint8 and tuple(value.shape) == self._table.in_bytes(name)
        if tuple(value.shape) != shape and not in_bytes:
            return f"has shape {tuple(value.shape)}, the model needs {shape}"
        if name in self._pieces and in_bytes != (name in self._in_bytes):
            return "came partly as floats and partly as codes"
        shape = tuple(value.shape)
        if value.dtype not in CASTABLE and not in_bytes:
            return f"has dtype {value.dtype}, the model needs a floating-point one, dequantised"
        if isinstance(value, SparsePatch):
            if value.box is not None and not value.box.fits(shape):
                return f"patch of {value.box.starts}..{value.box.stops} lies outside {shape}"
            return patch_fault(value)
        if isinstance(value, TensorPiece):
            if not value.box.fits(shape):
                return f"piece {value.box.starts}..{value.box.stops} lies outside {shape}"
            if tuple(value.values.shape) != value.box.shape:
                return f"a piece of shape {value.box.shape} came as {tuple(value.values.shape)}"
        return None

    def _duplicate(self, name: str, value: WeightValue) -> str | None:
        box = value.box if isinstance(value, TensorPiece | SparsePatch) else None
        if box is None:
            return "was sent twice" if name in self._seen else None
        if name in self._seen and name not in self._pieces:
            return "was sent twice: whole, and in pieces"
        # Repeats are seen here; overlaps are searched for once, when all pieces are known.
        boxes = self._pieces.setdefault(name, {})
        if box in boxes:
            return f"piece {box.starts}..{box.stops} was sent twice"
        boxes[box] = None
        return None

    def _overlaps(self) -> Iterator[str]:
        for name, boxes in self._pieces.items():
            if found := first_overlap(boxes):
                a, b = found
                yield f"{name}: pieces {a.starts}..{a.stops} and {b.starts}..{b.stops} overlap"

    def _covered(self, name: str, boxes: Iterable[Box]) -> bool:
        """Whether disjoint ``boxes`` hold every element this rank takes: counting suffices."""
        for slot in self._table.slots[self._table.aliases.get(name, name)]:
            needs = self._table.needs(slot)
            if name in self._in_bytes:
                needs = self._quantized.form(slot, in_bytes=True).whole
            common = (needs.intersect(box) for box in boxes)
            if sum(c.numel for c in common if c is not None) != needs.numel:
                return False
        return True

    def _raise_problems(self) -> None:
        if self._problems:
            raise WeightMismatch(some(self._problems, between="; "), problems=self._problems)


def patch_fault(patch: SparsePatch) -> str | None:
    """What is wrong with the positions of a patch, or None."""
    positions, values = patch.positions, patch.values
    if positions.dim() != 1 or positions.shape != values.shape or positions.dtype != torch.int64:
        return "a patch needs equally many flat int64 positions and values"
    if not len(positions):
        return None
    if int(positions[0]) < 0 or int(positions[-1]) >= prod(patch.shape):
        return f"patch positions lie outside shape {tuple(patch.shape)}"
    if not bool((positions[1:] > positions[:-1]).all()):
        return "patch positions must be unique and ascending"
    return None
