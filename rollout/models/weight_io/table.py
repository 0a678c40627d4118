"""One rank's weight table: every slot of every checkpoint tensor, and checks that it is whole."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from rollout.errors import WeightMismatch, some
from rollout.weights import Box, Layout, Shape, WeightSlot
from rollout.weights.names import CACHE_SCALES
from rollout.weights.packed_rows import packed_shape
from rollout.weights.quantization import Scheme
from rollout.weights.spellings import Spellings

SCALE = "_scale"  # ends the name of the parameter that has the scales of a quantised one
PENDING = 1 << 25  # elements that may wait for others beside two of the largest tensors: a bucket's
DIGESTS = "quantized_digests"  # of a model: [quantised slots, 3] int64; see ``quantized.py``

# Trailing name components that checkpoints may carry and no parameter takes.
IGNORED: tuple[tuple[str, ...], ...] = (
    ("rotary_emb", "inv_freq"),
    *((name,) for name in CACHE_SCALES),
)


@dataclass(frozen=True, slots=True)
class ParamSpec:
    """A logical parameter: its shape, how it lies in memory, and boxes that are always zero.

    ``scheme``: of a quantised one; ``layout`` is that of its codes, scales lie beside it.
    """

    shape: Shape
    layout: Layout
    padding: tuple[Box, ...] = ()
    scheme: Scheme | None = None

    def nbytes(self, dtype: torch.dtype) -> int:
        """What it takes in memory, in ``dtype`` where it is not quantised; scales are counted."""
        if self.scheme is None:
            return prod(self.layout.storage_shape(self.shape)) * dtype.itemsize
        scales = prod(self.shape[:-1]) * self.scheme.cells(self.shape[-2:])
        codes = prod(self.shape) // self.scheme.per_byte
        return codes + scales * self.scheme.scale_dtype.itemsize


@dataclass(frozen=True, slots=True)
class WeightTable:
    """What one rank takes from a checkpoint.

    ``slots``: source name -> where its boxes land (maybe none of its elements on this rank);
    ``params``: parameter name -> spec; ``aliases``: a source that must equal another, -> its owner;
    ``spellings``: other names under which the sources may come; ``prefixes``: what may stand before
    them, and what a checkpoint may have and this model has not; see ``weights.names.placed``.
    ``quantized``: slots of quantised parameters, by their rows of the parameter ``digests``;
    ``pending``: elements of such tensors that a load may keep until their cells are complete.
    """

    slots: Mapping[str, tuple[WeightSlot, ...]]
    params: Mapping[str, ParamSpec]
    aliases: Mapping[str, str]
    ignored: tuple[tuple[str, ...], ...] = IGNORED
    spellings: Spellings = field(default_factory=Spellings)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    quantized: Mapping[WeightSlot, int] = field(default_factory=dict)
    pending: int = 0
    digests: str = DIGESTS

    def params_of(self, slot: WeightSlot) -> tuple[str, ...]:
        """The parameters that hold what comes for a slot."""
        if slot not in self.quantized:
            return (slot.param,)
        return (slot.param, slot.param + SCALE, self.digests)

    def scheme(self, slot: WeightSlot) -> Scheme:
        """Of the parameter of a quantised slot."""
        scheme = self.params[slot.param].scheme
        assert scheme is not None, f"{slot.param} is not quantised"
        return scheme

    def in_bytes(self, source: str) -> Shape | None:
        """The shape of a source's codes and scales in bytes (``packed_rows``); None of others."""
        slot = next((s for s in self.slots.get(source, ()) if s in self.quantized), None)
        return None if slot is None else packed_shape(slot.shape, self.scheme(slot))

    def needs(self, slot: WeightSlot) -> Box:
        """What has to come of the source: the slot's take, of quantised ones whole cells."""
        if slot not in self.quantized:
            return slot.take
        return self.scheme(slot).cover(slot.shape, slot.take)

    def sent_box(self, slot: WeightSlot) -> Box:
        """What a rank digests as sent for a quantised slot: all that it needs, where every rank
        needs the same.
        """
        cell = self.scheme(slot).cell(slot.shape)
        take = zip(slot.take.shape, slot.shape, cell, strict=True)
        same = all(some == whole or size >= whole for some, whole, size in take)
        return self.needs(slot) if same else slot.take

    def ignores(self, name: str) -> bool:
        """Whether ``name`` is known to carry nothing a parameter takes."""
        parts = tuple(name.split("."))
        return any(parts[-len(tail) :] == tail for tail in self.ignored)

    def shape_of(self, source: str) -> Shape:
        """The full shape of a source or alias of this table."""
        return self.slots[self.aliases.get(source, source)][0].shape


@runtime_checkable
class DeclaresWeights(Protocol):
    """A layer: ``specs`` of its own parameters, and the slots that fill them."""

    specs: dict[str, ParamSpec]

    def slots(self, prefix: str) -> list[WeightSlot]: ...


def build_table(
    model: nn.Module,
    aliases: Mapping[str, str] | None = None,
    prefixes: Mapping[str, str] | None = None,
) -> WeightTable:
    """Collect what the layers of ``model`` declare; works on meta parameters."""
    slots: dict[str, list[WeightSlot]] = defaultdict(list)
    params: dict[str, ParamSpec] = {}
    for prefix, module in model.named_modules():
        if not isinstance(module, DeclaresWeights):
            continue
        for name, spec in module.specs.items():
            params[f"{prefix}.{name}"] = spec
        for slot in module.slots(prefix):
            slots[slot.source].append(slot)
    quantized = [s for found in slots.values() for s in found if params[s.param].scheme is not None]
    return WeightTable(
        {k: tuple(v) for k, v in slots.items()},
        params,
        dict(aliases or {}),
        spellings=Spellings.of({name: found[0].shape for name, found in slots.items() if found}),
        prefixes=dict(prefixes or {}),
        quantized={slot: index for index, slot in enumerate(quantized)},
        pending=PENDING + 2 * max(prod(slot.shape) for slot in quantized) if quantized else 0,
    )


def check_table(table: WeightTable) -> None:
    """Raise ``WeightMismatch`` naming every parameter that is not written exactly once.

    Slots and padding must tile each logical parameter; every take lies inside its source, holds as
    many elements as its put, and all slots of a source agree on its shape.
    """
    problems: list[str] = []
    boxes: dict[str, list[Box]] = {name: list(spec.padding) for name, spec in table.params.items()}
    for source, slots in table.slots.items():
        if not slots:
            problems.append(f"{source}: has no slot; declare an empty one")
        for slot in slots:
            if slot.shape != slots[0].shape:
                problems.append(f"{source}: shapes {slots[0].shape} and {slot.shape} disagree")
            if not slot.take.fits(slot.shape):
                problems.append(f"{source}: take {slot.take} outside {slot.shape}")
            if slot.take.numel != slot.put.numel:
                problems.append(f"{source}: takes {slot.take.numel}, puts {slot.put.numel}")
            if slot.param in boxes:
                boxes[slot.param].append(slot.put)
            else:
                problems.append(f"{source}: there is no parameter {slot.param}")
    for name, spec in table.params.items():
        if fault := tiling_fault(boxes[name], spec.shape):
            problems.append(f"{name}: {fault}")
    for alias, owner in table.aliases.items():
        if owner not in table.slots:
            problems.append(f"{alias}: its owner {owner} is not a source")
        if alias in table.slots:
            problems.append(f"{alias}: is both an alias and a source")
    _raise_all("the weight table of this rank is not whole", problems)


def check_tables(tables: Sequence[WeightTable]) -> None:
    """Raise ``WeightMismatch`` unless the ranks together take each source exactly once.

    The distinct take boxes of a source over all ranks tile it; a box that several ranks take is a
    replica and must be the identical box. Every rank must know the same sources and aliases. Each
    table is checked by itself, too.
    """
    problems: list[str] = []
    for rank, table in enumerate(tables):
        try:
            check_table(table)
        except WeightMismatch as error:
            problems.append(f"rank {rank}: {error}")
        differing = set(table.slots) ^ set(tables[0].slots)
        if differing:
            problems.append(f"rank {rank}: knows other sources than rank 0: {sorted(differing)}")
        if dict(table.aliases) != dict(tables[0].aliases):
            problems.append(f"rank {rank}: knows other aliases than rank 0")
    for source in tables[0].slots:
        slots = [slot for table in tables for slot in table.slots.get(source, ())]
        takes = list(dict.fromkeys(slot.take for slot in slots))
        if slots and (fault := tiling_fault(takes, slots[0].shape)):
            problems.append(f"{source}: over {len(tables)} ranks: {fault}")
    _raise_all("the ranks' weight tables do not cover the checkpoint exactly once", problems)


def tiling_fault(boxes: Iterable[Box], shape: Shape) -> str | None:
    """None when the non-empty ``boxes`` tile ``shape`` exactly, else what is wrong."""
    solid, count = [], 0
    for box in boxes:
        if size := box.numel:
            solid.append(box)
            count += size
    for box in solid:
        if not box.fits(shape):
            return f"box {box.starts}..{box.stops} lies outside shape {shape}"
    if overlap := _overlap(solid):
        a, b = overlap
        return f"boxes {a.starts}..{a.stops} and {b.starts}..{b.stops} overlap"
    total = prod(shape)
    return None if count == total else f"{total - count} of {total} elements are not covered"


def first_overlap(boxes: Iterable[Box]) -> tuple[Box, Box] | None:
    """Two of the non-empty ``boxes`` that share an element, or None."""
    return _overlap([box for box in boxes if box.numel])


def _overlap(solid: Sequence[Box]) -> tuple[Box, Box] | None:
    """Sweeps along the dimension with the most distinct starts: only boxes whose range is still
    open are compared, so that thousands of disjoint slices cost little.
    """
    if len(solid) < 2:
        return None
    rank = len(solid[0].starts)
    if not rank:
        return solid[0], solid[1]
    axis = max(range(rank), key=lambda d: len({box.starts[d] for box in solid}))
    active: list[Box] = []
    for box in sorted(solid, key=lambda b: b.starts[axis]):
        active = [other for other in active if other.stops[axis] > box.starts[axis]]
        for other in active:
            if other.intersect(box) is not None:
                return other, box
        active.append(box)
    return None


def _raise_all(what: str, problems: list[str]) -> None:
    if problems:
        raise WeightMismatch(f"{what}: {some(problems, between='; ')}", problems=problems)
