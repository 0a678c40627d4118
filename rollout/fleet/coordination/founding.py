"""When a fleet gives up what it has promised: nobody holds it any more."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import replace

from rollout.fleet.coordination.actions import Promise
from rollout.fleet.coordination.member import Member


def new_epoch(
    promise: Promise,
    members: Collection[Member],
    keeps: Callable[[Member], bool],
    settled: int,
    now: float,
) -> Promise | None:
    """With the newest that there is; None while somebody may hold what was promised.

    ``keeps``: whether one that leaves may. ``settled``: the last grant of before it was promised.
    """
    if any(m.busy or now < m.serves_until for m in members):
        return None
    if any(keeps(m) if m.leaves else m.holds for m in members):
        return None
    # What was asked before is of no use: it may have voted for what is promised since.
    new = (m for m in members if m.answered > settled and not (m.leaves or m.unfit))
    standings = [m.standing for m in new if m.standing is not None]
    ours = promise.version or promise.digest
    stay = sum(not (m.gone or m.leaves or m.unfit) for m in members)
    if not standings or (ours and len(standings) < stay):
        return None  # whoever does not answer may hold it
    best = max(s.version for s in standings)
    if best == promise.version or any(s.prepared for s in standings):
        return None  # it is looked at first
    return replace(
        promise, epoch=secrets.randbits(48), version=best, digest=0, update_id="", before=0,
        adapters=(), adapters_before=(),
    )  # fmt: skip
