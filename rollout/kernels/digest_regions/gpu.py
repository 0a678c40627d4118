"""Triton ``digest_regions``: one launch for each pair of dtypes, one transfer of all sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.digest import EXPONENTS
from rollout.kernels.digest.gpu import STEP, digest, mixed
from rollout.kernels.digest.strides import collapse, offsets, row_major
from rollout.kernels.digest_regions import DigestedAs
from rollout.kernels.gpu_launch import BITS, FLOAT_TYPES, FLOATS, launch, narrow
from rollout.kernels.native import address
from rollout.kernels.region_lines import places_of
from rollout.kernels.region_table import (
    BLOCK,
    MOST_ROWS,
    RegionTable,
    RegionTables,
    Row,
    is_too_narrow,
    is_whole,
    make_table,
)

Kind = tuple[torch.dtype, torch.dtype, bool]  # given, digested as; see ``is_whole``


@dataclass(frozen=True, slots=True)
class _Group:
    """Regions of one kind; ``regions``: whose rows they are, one after the other."""

    table: RegionTable
    regions: list[int]
    begins: Tensor  # [regions] int64: the first program of each
    ends: Tensor  # [regions] int64: behind its last


def digest_regions(
    values: Sequence[Tensor],
    places: Sequence[DigestedAs],
    tables: RegionTables | None = None,
) -> list[tuple[int, int]]:
    def plan() -> tuple[dict[Kind, _Group], list[int]]:
        return _plan(values, places)

    groups, alone = plan() if tables is None else tables.planned(places_of(values), places, plan)
    found = [(0, 0)] * len(values)
    for index in alone:
        place, count = places[index], [0]
        total = digest(values[index].to(place.dtype), place.shape, place.box, count)
        found[index] = total, count[0]
    sums = [_launch(*kind, group) for kind, group in groups.items()]
    told = torch.cat(sums, 1).tolist() if sums else [[], []]  # one wait for all
    owners = [index for group in groups.values() for index in group.regions]
    for index, total, count in zip(owners, *told, strict=True):
        found[index] = total % 2**64, count
    return found


def _plan(
    values: Sequence[Tensor], places: Sequence[DigestedAs]
) -> tuple[dict[Kind, _Group], list[int]]:
    """What is digested in one launch for each kind, and what goes by itself."""
    groups: dict[Kind, list[tuple[int, list[tuple[Row, int]]]]] = {}
    alone: list[int] = []
    for index, (value, place) in enumerate(zip(values, places, strict=True)):
        assert tuple(value.shape) == place.box.shape, f"{value.shape} do not fill {place.box}"
        assert place.box.fits(place.shape), f"{place.box} is not inside {place.shape}"
        if not value.numel():
            continue
        rows = _rows(value, place)
        if rows is None:
            alone.append(index)
            continue
        whole = all(is_whole(row[0], row[2], row[3], row[5]) for row, _ in rows)
        groups.setdefault((value.dtype, place.dtype, whole), []).append((index, rows))
    return {kind: _group(found, values[0].device) for kind, found in groups.items()}, alone


def _group(found: list[tuple[int, list[tuple[Row, int]]]], at: torch.device) -> _Group:
    table = make_table([row for _, rows in found for row in rows], at)
    last = torch.tensor([len(rows) for _, rows in found]).cumsum(0).to(at) - 1  # row of each
    ends = table.ends[last]
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    return _Group(table, [index for index, _ in found], begins, ends)


def _launch(given: torch.dtype, wanted: torch.dtype, whole: bool, group: _Group) -> Tensor:
    """[2, regions] int64: the digest of each, and how many of its values are not finite."""
    table = group.table
    parts = torch.empty((2, *table.grid), dtype=torch.int64, device=table.rows.device)
    same = given == wanted
    launch(
        _digest,
        table.grid,
        *(table.rows, table.owners, table.firsts, parts),
        SOURCE=BITS[given.itemsize] if same else FLOAT_TYPES[given],
        TARGET=FLOAT_TYPES.get(wanted, tl.float32),
        BITS=BITS[wanted.itemsize],
        CAST=not same,
        EXPONENT=EXPONENTS.get(wanted, 0),
        WHOLE=whole,
        BLOCK=BLOCK,
        ROUNDS=table.rounds,
        warps=2,
    )
    # Sums of integers, which may wrap around: differences of those so far are each region's.
    sums = torch.nn.functional.pad(parts.cumsum(1), (1, 0))
    return sums[:, group.ends] - sums[:, group.begins]


def _rows(value: Tensor, place: DigestedAs) -> list[tuple[Row, int]] | None:
    """What the kernel reads of one region, and its blocks; None where it has to go by itself."""
    if value.dtype != place.dtype and not (value.dtype in FLOATS and place.dtype in FLOATS):
        return None
    strides = row_major(place.shape)
    *outer, lines, columns = collapse(list(zip(value.shape, value.stride(), strides, strict=True)))
    if columns[1] != 1 or is_too_narrow(lines[0], columns[0]):
        return None
    bases = [x for _, x in zip(range(MOST_ROWS + 1), offsets(outer), strict=False)]
    if len(bases) > MOST_ROWS:
        return None
    start, per_line = address(value), -(-columns[0] // BLOCK)
    position = sum(a * s for a, s in zip(place.box.starts, strides, strict=True))
    return [
        (
            (
                start + memory * value.element_size(),
                position + ahead,
                *(lines[0], columns[0], per_line, lines[1], lines[2]),
            ),
            lines[0] * per_line,
        )
        for memory, ahead in bases
    ]


@triton.jit
def _digest(
    table,
    owners,
    firsts,
    parts,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    BITS: tl.constexpr,
    CAST: tl.constexpr,
    EXPONENT: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """A row: address, position, lines, columns, blocks of a line, the lines' strides of both.

    An element costs about as many instructions as there is time for beside its way from memory:
    what WHOLE says needs no masks and is read in wide words, the product of a position goes on from
    the one before, and what is not finite is counted only where there is some.
    """
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * 7
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    position = tl.load(row + 1) + 1
    lines, columns, per_line = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    stride, line_positions = tl.load(row + 5), tl.load(row + 6)
    if WHOLE:  # with what it knows of addresses the compiler makes wide words of elements
        source, stride = tl.multiple_of(source, 16), tl.multiple_of(stride, 8)
    first = tl.load(firsts + program)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.uint64)
    worst = tl.zeros([BLOCK], BITS)
    line = first // per_line
    block = first - line * per_line
    rounds = tl.minimum(lines * per_line - first, ROUNDS).to(tl.int32)
    at = position + line * line_positions + block * BLOCK
    key = (at + lane).to(tl.uint64) * STEP
    behind = (per_line - 1) * BLOCK  # a line's last block
    leap = (line_positions - behind).to(tl.uint64) * STEP
    step = tl.full((), BLOCK, tl.uint64) * STEP
    offset = line * stride + block * BLOCK
    live = lane < tl.where(rounds > 0, columns - block * BLOCK, 0)
    coming = tl.load(source + offset + lane, mask=live, other=0)
    for n in range(rounds):
        value, here = coming, live
        block += 1
        ends = block == per_line
        offset += tl.where(ends, stride - behind, BLOCK)
        block = tl.where(ends, 0, block)
        # What comes next is on its way while this is added up.
        left = tl.where(n + 1 < rounds, columns - block * BLOCK, 0)
        if WHOLE:
            left = tl.where(n + 1 < rounds, BLOCK, 0)
        live = lane < left
        coming = tl.load(source + offset + lane, mask=live, other=0)
        if CAST:
            value = narrow(value.to(tl.float32), TARGET).to(BITS, bitcast=True)
        x = key + value.to(tl.uint64)
        if not WHOLE:
            x = tl.where(here, x, 0)  # of 0 comes 0
        total += mixed(mixed(x))
        if EXPONENT != 0:
            worst = tl.maximum(worst, value & EXPONENT)
        key += tl.where(ends, leap, step)
    tl.store(parts + program, tl.sum(total, 0).to(tl.int64, bitcast=True))
    count = tl.full((), 0, tl.int64)
    some = False
    if EXPONENT != 0:
        some = tl.max(worst.to(tl.int32), 0) == EXPONENT
    if some:
        found = tl.zeros([BLOCK], tl.int64)
        for n in range(rounds):
            line = (first + n) // per_line
            begin = (first + n - line * per_line) * BLOCK
            live = lane < columns - begin
            value = tl.load(source + line * stride + begin + lane, mask=live, other=0)
            if CAST:
                value = narrow(value.to(tl.float32), TARGET).to(BITS, bitcast=True)
            found += ((value & EXPONENT) == EXPONENT).to(tl.int64)
        count = tl.sum(found, 0)
    tl.store(parts + tl.num_programs(0) + program, count)
