"""Native ``digest_regions``: one call for each pair of dtypes, over a table of addresses."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from operator import mul

import torch
from torch import Tensor

from rollout.kernels.digest import EXPONENTS, digest
from rollout.kernels.digest.strides import row_major
from rollout.kernels.digest_regions import DigestedAs
from rollout.kernels.native import address, entry
from rollout.kernels.region_lines import LARGE, RegionRows, lines_of, places_of
from rollout.kernels.region_table import RegionTables

_MASK = (1 << 64) - 1


Group = dict[tuple[torch.dtype, torch.dtype], RegionRows]


def digest_regions(
    values: Sequence[Tensor],
    places: Sequence[DigestedAs],
    tables: RegionTables | None = None,
) -> list[tuple[int, int]]:
    def plan() -> tuple[Group, list[int]]:
        return _plan(values, places)

    groups, alone = plan() if tables is None else tables.planned(places_of(values), places, plan)
    found = [(0, 0)] * len(values)
    for index in alone:
        count, place = [0], places[index]
        total = digest(values[index].to(place.dtype), place.shape, place.box, count)
        found[index] = total, count[0]
    for pair, rows in groups.items():
        for index, total, bad in _run(pair, rows):
            found[index] = total & _MASK, bad
    return found


def _plan(values: Sequence[Tensor], places: Sequence[DigestedAs]) -> tuple[Group, list[int]]:
    """The rows that C reads, and what goes by itself."""
    groups: Group = {}
    alone: list[int] = []
    for index, (value, place) in enumerate(zip(values, places, strict=True)):
        shape, box = place.shape, place.box
        assert tuple(value.shape) == box.shape, f"values {value.shape} do not fill {box}"
        assert box.fits(shape), f"{box} is not inside {shape}"
        positions, pair = row_major(shape), (value.dtype, place.dtype)
        lines = lines_of(box.shape, value.stride(), positions) if _is_known(value, *pair) else None
        if lines is None:
            alone.append(index)
            continue
        (number, line, apart), (columns, column, step) = lines
        groups.setdefault(pair, RegionRows()).add(
            *(index, address(value), sum(map(mul, box.starts, positions))),
            *(number, columns, line, column, apart, step),
        )
    return groups, alone


def _is_known(value: Tensor, given: torch.dtype, wanted: torch.dtype) -> bool:
    if not 0 < value.numel() <= LARGE or value.is_neg():
        return False
    if given == wanted:
        return not given.is_complex
    return given == torch.float32 and wanted == torch.bfloat16


def _run(pair: tuple[torch.dtype, torch.dtype], rows: RegionRows) -> zip[tuple[int, int, int]]:
    given, wanted = pair
    sums, bad = (array("Q", bytes(8 * len(rows))) for _ in range(2))
    entry("digest_regions")(
        *(rows.address, len(rows), wanted.itemsize, int(given != wanted)),
        *(torch.get_num_threads(), EXPONENTS.get(wanted, 0)),
        *(sums.buffer_info()[0], bad.buffer_info()[0]),
    )
    return zip(rows.owners, sums, bad, strict=True)
