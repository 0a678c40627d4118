"""Native ``copy_regions``: one call for each kind of copy, over a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.kernels.native import address, entry
from rollout.kernels.nontemporal_copy import nontemporal_copy
from rollout.kernels.region_lines import LARGE, RegionRows, lines_of, places_of
from rollout.kernels.region_table import RegionTables

_ROUNDED = 0x102  # as C has it


def copy_regions(
    targets: Sequence[Tensor], sources: Sequence[Tensor], tables: RegionTables | None = None
) -> None:
    def plan() -> tuple[dict[int, RegionRows], list[int]]:
        return _plan(targets, sources)

    if tables is None or any(source.device.type != "cpu" for source in sources):
        groups, alone = plan()
    else:
        groups, alone = tables.planned(places_of((*targets, *sources)), (), plan)
    for index in alone:
        nontemporal_copy(targets[index], sources[index].detach())
    for kind, rows in groups.items():
        entry("copy_regions")(rows.address, len(rows), kind, torch.get_num_threads())


def _plan(
    targets: Sequence[Tensor], sources: Sequence[Tensor]
) -> tuple[dict[int, RegionRows], list[int]]:
    """The rows that C reads, and what goes by itself."""
    groups: dict[int, RegionRows] = {}
    alone: list[int] = []
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        assert target.shape == source.shape, f"{target.shape} and {source.shape} differ"
        kind = _kind(target, source)
        found = kind and lines_of(tuple(target.shape), target.stride(), source.stride())
        if not kind or not found:
            alone.append(index)
            continue
        (lines, to_line, from_line), (columns, to_column, from_column) = found
        groups.setdefault(kind, RegionRows()).add(
            *(index, address(source), address(target), lines, columns),
            *(from_line, from_column, to_line, to_column),
        )
    return groups, alone


def _kind(target: Tensor, source: Tensor) -> int:
    """How C copies the elements, 0 where it does not."""
    if target.numel() > LARGE or source.device.type != "cpu" or source.is_neg():
        return 0
    if target.dtype == source.dtype:
        return 0 if target.dtype.is_complex else target.element_size()
    is_rounded = target.dtype == torch.bfloat16 and source.dtype == torch.float32
    return _ROUNDED if is_rounded else 0
