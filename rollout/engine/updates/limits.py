"""What an update would take, judged by its plan before anything of it is staged."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

from rollout.errors import LimitExceeded
from rollout.weight_sync.protocol.messages import MIN_BUCKET_BYTES, UpdateRequest
from rollout.weight_sync.protocol.rates import measured_rates
from rollout.weight_sync.protocol.receipts import UpdateReceipt

FLIP = 0.005  # seconds that a commit which moves no byte is taken for until one has been measured
VERBS = 0.02  # seconds that the begin, the vote and the commit of an update take beside its bytes
_MEASURED = 8  # commits of one kind that an estimate rests on
_BUCKETS = 2  # that a rank may hold at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """What an update takes by one way of staging: seconds without a step, and the most bytes that
    a rank takes on its device beyond what it holds.
    """

    staging: str
    stall: float
    memory: int
    basis: str  # of the stall

    def keeps(self, request: UpdateRequest) -> bool:
        return not self.broken(request)

    def broken(self, request: UpdateRequest) -> tuple[str, ...]:
        """The limits of ``request`` that it would break, by their names."""
        stall, memory = request.max_stall, request.max_extra_memory
        found = [("max_stall", stall is not None and self.stall > stall)]
        found += [("max_extra_memory", memory is not None and self.memory > memory)]
        return tuple(name for name, over in found if over)

    def told(self, max_stall: float | None, stall: float) -> dict[str, str]:
        """For the receipt: this beside the ``stall`` that it came to."""
        found = {"foreseen_stall": f"{self.stall:.6f}", "foreseen_basis": self.basis}
        found["foreseen_extra_memory_bytes"] = str(self.memory)
        if max_stall is not None and stall > max_stall:
            found["max_stall"] = f"broken: {stall:.6f} s, {max_stall:g} s were allowed"
        elif max_stall is not None:
            found["max_stall"] = f"kept: {stall:.6f} s of {max_stall:g} s"
        return found

    def __str__(self) -> str:
        return (
            f"staging={self.staging!r} stalls for about {self.stall:.4f} s ({self.basis}) and takes"
            f" {self.memory} bytes more on each rank's device"
        )


class UpdateLimits:
    """Foresees updates of one engine by its plan and by the commits that it has measured.

    A commit that flips two instances moves no byte; one that exchanges contents copies them and
    reads them again; without staging everything happens inside the stall.
    """

    def __init__(self) -> None:
        # By kind, seconds and the bytes that came.
        self._measured: dict[str, deque[tuple[float, int]]] = {}

    def measured(self, kind: str, stall: float, num_bytes: int) -> None:
        """A commit: ``kind`` is "flip", "exchange" or, of ``num_bytes`` that came, "held"."""
        self._measured.setdefault(kind, deque(maxlen=_MEASURED)).append((stall, num_bytes))

    def check(
        self,
        request: UpdateRequest,
        plans: Sequence[Mapping[str, Any]],
        receipts: Sequence[UpdateReceipt],
        num_bytes: int,
    ) -> Foreseen:
        """What is foreseen of ``request``; ``LimitExceeded`` where that breaks one of its limits.

        ``plans``: of each rank, by staging (``ModelInstances.foresee``). ``num_bytes``: that the
        sender sends.
        """
        chosen = self.foreseen(request.staging, request, plans, receipts, num_bytes)
        if not (broken := chosen.broken(request)):
            return chosen
        others = [
            self.foreseen(staging, request, plans, receipts, num_bytes)
            for staging in plans[0]
            if staging not in (request.staging, "auto")
        ]
        ways = [other for other in others if other.keeps(request) and _can(other, request)]
        if ways:
            remedy = "; ".join(f"{way} and would do" for way in ways)
        else:
            remedy = f"no other way of staging does: allow {' and '.join(_needed(chosen, broken))}"
            smaller = chosen.memory - _BUCKETS * min(request.bucket_bytes, num_bytes)
            limit = request.max_extra_memory
            room = 0 if limit is None else (limit - smaller) // _BUCKETS
            if limit is not None and limit < chosen.memory and room >= MIN_BUCKET_BYTES:
                remedy += f", or take bucket_bytes={room} or less"
        raise LimitExceeded(
            f"the update would break {' and '.join(broken)}: {chosen}; {remedy}. Nothing was staged"
        )

    def foreseen(
        self,
        staging: str,
        request: UpdateRequest,
        plans: Sequence[Mapping[str, Any]],
        receipts: Sequence[UpdateReceipt],
        num_bytes: int,
    ) -> Foreseen:
        """By one way of staging, on the rank that takes most."""
        rows = [plan[staging] for plan in plans]
        buckets = _BUCKETS * min(request.bucket_bytes, num_bytes)
        stall, basis = self._stall(staging, max(r["moved"] for r in rows), receipts, num_bytes)
        memory = buckets + max(row["extra"] for row in rows)
        return Foreseen(staging=staging, stall=stall, memory=memory, basis=basis)

    def _stall(
        self, staging: str, moved: int, receipts: Sequence[UpdateReceipt], num_bytes: int
    ) -> tuple[float, str]:
        if staging == "none":
            return self._held(receipts, num_bytes)
        kind = "exchange" if moved else "flip"
        known = self._measured.get(kind)
        if known:
            basis = f"the median of the last {len(known)} commits of this kind"
            return median(seconds for seconds, _ in known), basis
        if not moved:
            return FLIP, "assumed of a commit that moves no byte: none has been measured"
        copy, digested = self._rates
        seconds = moved * (3 / copy + 1 / digested)
        return seconds, f"{moved} bytes to exchange and to read again, at this host's speed"

    def _held(self, receipts: Sequence[UpdateReceipt], num_bytes: int) -> tuple[float, str]:
        """Without staging: the whole of an update.

        Of earlier updates those alone that brought half as much or more: what a small one takes is
        not for its bytes.
        """
        least = max(1, num_bytes // 2)
        known = [s / n for s, n in self._measured.get("held", ()) if n >= least]
        if known:
            return median(known) * num_bytes, f"the median of the last {len(known)} such updates"
        for receipt in reversed(receipts):
            if receipt.wire_bytes >= receipt.num_bytes >= least and not receipt.adapters:
                took = receipt.timings.get("total", 0.0) * num_bytes / receipt.num_bytes
                return took, f"all of the update, as version {receipt.version} took"
        copy, digested = self._rates
        seconds = VERBS + num_bytes * (4 / copy + 2 / digested)
        return seconds, "all of the update, at this host's speed"

    @cached_property
    def _rates(self) -> tuple[float, float]:
        return measured_rates()


def _can(way: Foreseen, request: UpdateRequest) -> bool:
    """Whether a sender may be told of it: a delta needs a shadow."""
    return way.staging != "none" or request.encoding != "delta"


def _needed(chosen: Foreseen, broken: Sequence[str]) -> list[str]:
    told = {
        "max_stall": f"max_stall={chosen.stall * 1.001:.4g}",  # no less, however it is rounded
        "max_extra_memory": f"max_extra_memory={chosen.memory}",
    }
    return [told[name] for name in broken]
