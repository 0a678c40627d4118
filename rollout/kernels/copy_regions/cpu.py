"""Native ``copy_regions``: one call for each kind of copy, over a table of addresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout.kernels.native import address, entry
from rollout.kernels.nontemporal_copy import nontemporal_copy
from rollout.kernels.region_lines import LARGE, RegionRows, lines_of
from rollout.kernels.region_table import RegionTables

_ROUNDED = 0x102  # as C has it


def copy_regions(
    targets: Sequence[Tensor], sources: Sequence[Tensor], tables: RegionTables | None = None
) -> None:
    groups: dict[int, RegionRows] = {}
    for index, (target, source) in enumerate(zip(targets, sources, strict=True)):
        assert target.shape == source.shape, f"{target.shape} and {source.shape} differ"
        kind = _kind(target, source)
        found = kind and lines_of(tuple(target.shape), target.stride(), source.stride())
        if not kind or not found:
            nontemporal_copy(target, source.detach())
            continue
        (lines, to_line, from_line), (columns, to_column, from_column) = found
        groups.setdefault(kind, RegionRows()).add(
            *(index, address(source), address(target), lines, columns),
            *(from_line, from_column, to_line, to_column),
        )
    for kind, rows in groups.items():
        entry("copy_regions")(rows.address, len(rows), kind, torch.get_num_threads())


def _kind(target: Tensor, source: Tensor) -> int:
    """How C copies the elements, 0 where it does not."""
    if target.numel() > LARGE or source.device.type != "cpu" or source.is_neg():
        return 0
    if target.dtype == source.dtype:
        return 0 if target.dtype.is_complex else target.element_size()
    is_rounded = target.dtype == torch.bfloat16 and source.dtype == torch.float32
    return _ROUNDED if is_rounded else 0
