"""One engine's statistics of many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from rollout.generation.metrics import EngineStats, HistogramSnapshot

_HIGHEST = (
    "kv_usage",
    "last_stall_seconds",
    "pinned_version",
    "weight_updates_nonfinite_total",  # an update goes to all of them
)


def summed(rows: Sequence[EngineStats]) -> EngineStats:
    """Totals added up; what is no total is the mean, or the first member's."""
    first, found = rows[0], {}
    for name in (f.name for f in fields(EngineStats)):
        values: list[Any] = [getattr(row, name) for row in rows]
        kind = type(values[0])
        if name in ("epoch", "fleet", "members", "seed", "serving_lease", "weight_version"):
            continue
        if name in _HIGHEST:
            found[name] = max(values)
        elif kind in (int, float):
            found[name] = sum(values)
        elif kind is HistogramSnapshot:
            counts = tuple(map(sum, zip(*(v.counts for v in values), strict=True)))
            total = sum(v.total for v in values)
            found[name] = HistogramSnapshot(values[0].bounds, counts, total)
        elif isinstance(values[0], dict):
            keys = {key for value in values for key in value}
            found[name] = {key: sum(value.get(key, 0) for value in values) for key in keys}
    return replace(first, **found)
