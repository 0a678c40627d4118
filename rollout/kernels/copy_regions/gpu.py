"""Triton ``copy_regions``: one launch for each pair of dtypes, over a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.digest.strides import collapse, offsets
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

Kind = tuple[torch.dtype, torch.dtype, bool]  # of the source, of the target; see ``is_whole``


def copy_regions(
    targets: Sequence[Tensor], sources: Sequence[Tensor], tables: RegionTables | None = None
) -> None:
    here = targets[0].device if targets else None
    if any(source.device != here for source in sources):  # which no launch of ours reads
        pairs = list(zip(targets, sources, strict=True))
        for target, source in pairs:
            if source.device != here:
                target.copy_(source)
        near = [pair for pair in pairs if pair[1].device == here]
        targets, sources = [target for target, _ in near], [source for _, source in near]

    def plan() -> tuple[dict[Kind, RegionTable], list[int]]:
        return _plan(targets, sources)

    if tables is None:
        groups, alone = plan()
    else:
        groups, alone = tables.planned(places_of((*targets, *sources)), (), plan)
    for index in alone:
        targets[index].copy_(sources[index])
    for (given, wanted, whole), table in groups.items():
        same = given == wanted
        launch(
            _copy,
            table.grid,
            *(table.rows, table.owners, table.firsts),
            SOURCE=BITS[given.itemsize] if same else FLOAT_TYPES[given],
            TARGET=BITS[wanted.itemsize] if same else FLOAT_TYPES[wanted],
            CAST=not same,
            WHOLE=whole,
            BLOCK=BLOCK,
            ROUNDS=table.rounds,
            warps=2,
        )


def _plan(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[dict[Kind, RegionTable], list[int]]:
    """A table for each kind, and what goes by itself."""
    groups: dict[Kind, list[tuple[Row, int]]] = {}
    alone: list[int] = []
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        assert target.shape == source.shape, f"{target.shape} and {source.shape} differ"
        if not target.numel():
            continue
        rows = _rows(target, source)
        if rows is None:
            alone.append(index)
            continue
        whole = all(
            is_whole(a, lines, columns, here) and is_whole(b, lines, columns, there)
            for (a, b, lines, columns, _, here, there), _ in rows
        )
        groups.setdefault((source.dtype, target.dtype, whole), []).extend(rows)
    return {kind: make_table(rows, targets[0].device) for kind, rows in groups.items()}, alone


def _rows(target: Tensor, source: Tensor) -> list[tuple[Row, int]] | None:
    """What the kernel reads of one copy, and its blocks; None where it has to go by itself."""
    if target.dtype != source.dtype and not (target.dtype in FLOATS and source.dtype in FLOATS):
        return None
    strides = zip(target.shape, source.stride(), target.stride(), strict=True)
    *outer, lines, columns = collapse(list(strides))
    if columns[1] != 1 or columns[2] != 1 or is_too_narrow(lines[0], columns[0]):
        return None
    places = [x for _, x in zip(range(MOST_ROWS + 1), offsets(outer), strict=False)]
    if len(places) > MOST_ROWS:
        return None
    # ``address`` refuses what does not lie in its memory: a bad one would cost the process its
    # context, and with it the weights that are live.
    reads, writes = address(source), address(target)
    per_line = -(-columns[0] // BLOCK)
    return [
        (
            (
                reads + a * source.element_size(),
                writes + b * target.element_size(),
                *(lines[0], columns[0], per_line, lines[1], lines[2]),
            ),
            lines[0] * per_line,
        )
        for a, b in places
    ]


@triton.jit
def _copy(
    table,
    owners,
    firsts,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    CAST: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """A row: source, target, lines, columns, blocks of a line, and both strides of the lines."""
    program = tl.program_id(0)
    row = table + tl.load(owners + program).to(tl.int64) * 7
    source = tl.load(row).to(tl.pointer_type(SOURCE))
    target = tl.load(row + 1).to(tl.pointer_type(TARGET))
    lines, columns, per_line = tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
    source_stride, target_stride = tl.load(row + 5), tl.load(row + 6)
    if WHOLE:  # with what it knows of addresses the compiler makes wide words of elements
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        source_stride = tl.multiple_of(source_stride, 8)
        target_stride = tl.multiple_of(target_stride, 8)
    first = tl.load(firsts + program)
    line = first // per_line
    block = first - line * per_line
    rounds = tl.minimum(lines * per_line - first, ROUNDS).to(tl.int32)
    lane = tl.arange(0, BLOCK)
    behind = (per_line - 1) * BLOCK  # a line's last block
    here, there = line * source_stride + block * BLOCK, line * target_stride + block * BLOCK
    for _ in range(rounds):
        if WHOLE:
            value = tl.load(source + here + lane)
        else:
            live = lane < columns - block * BLOCK
            value = tl.load(source + here + lane, mask=live, other=0)
        if CAST:
            value = narrow(value.to(tl.float32), TARGET)
        if WHOLE:
            tl.store(target + there + lane, value)
        else:
            tl.store(target + there + lane, value, mask=live)
        block += 1
        ends = block == per_line
        here += tl.where(ends, source_stride - behind, BLOCK)
        there += tl.where(ends, target_stride - behind, BLOCK)
        block = tl.where(ends, 0, block)
