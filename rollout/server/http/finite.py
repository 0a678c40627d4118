"""Numbers that JSON has."""

from __future__ import annotations

from math import isfinite


def finite(value: float) -> float | None:
    """JSON has no NaN and no infinity: a logprob that is none of its numbers is null."""
    return value if isfinite(value) else None
