"""Waiting for all members in a step of an update, and not for long for those that are late."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any

from rollout.errors import DeadlineExceeded

LOOK = 0.1  # seconds between looks at who is given up


def results(
    parts: Mapping[str, Future[Any]],
    given_up: Callable[[], Mapping[str, str] | None],
    enough: int,
    patience: float,
) -> dict[str, Any]:
    """What each returned, or the error it raised, by name.

    ``given_up``: who is waited for no more, and why; None once nobody is. Once ``enough`` have
    succeeded the others have ``patience`` seconds more, or as long as that has taken, where that
    is longer.
    """
    began, limit = time.monotonic(), float("inf")
    found: dict[str, Any] = {}
    left = dict(parts)
    while left:
        wait(left.values(), LOOK)
        for name in [name for name, part in left.items() if part.done()]:
            part = left.pop(name)
            found[name] = part.exception() or part.result()
        now, good = time.monotonic(), sum(not isinstance(r, Exception) for r in found.values())
        if good >= enough:
            limit = min(limit, late_at(began, now, patience))
        if (whys := given_up()) is None:
            break
        for name in list(left):
            if now >= limit:
                whys = {name: f"it is {now - began:.3g} s behind, longer than the others took"}
            if name in whys:
                del left[name]
                found[name] = DeadlineExceeded(f"member {name} is waited for no more: {whys[name]}")
    return found


def late_at(began: float, now: float, patience: float) -> float:
    """When the others are late, once enough have done at ``now`` what they began at ``began``."""
    return now + max(patience, now - began)
