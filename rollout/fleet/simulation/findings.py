"""What a simulated course goes through, and what it comes to; see ``simulator``."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """``delay``: mean seconds of a message. ``loss``: the share that is lost. ``stage``: mean
    seconds in which a member takes an update's bytes. ``disk``: mean seconds of a durable write.
    ``patience``: seconds for which those are waited for that are later than enough others (a
    quarter of the default timeout, as in a service).
    """

    delay: float = 0.002
    loss: float = 0.0
    stage: float = 0.5
    disk: float = 0.005
    patience: float = 7.5


@dataclass(slots=True)
class Findings:
    """What a run came to. ``skew``: seconds between the first and the last member of a commit.
    ``total``: seconds of an update that was committed. ``seconds``: of the whole course.
    """

    commits: int = 0
    aborts: int = 0
    faults: int = 0
    reads: int = 0
    refused: int = 0
    refounded: int = 0
    rollbacks: int = 0
    seconds: float = 0.0
    skew: list[float] = field(default_factory=list)
    total: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Figures alone; of ``skew`` and ``total`` the median and the 99th percentile."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        for name in ("skew", "total"):
            each = sorted(found[name]) or [0.0]
            found[name] = [each[len(each) // 2], each[len(each) * 99 // 100]]
        return found

    def __str__(self) -> str:
        row = self.row()
        skew, total = row["skew"], row["total"]
        return (
            f"{self.commits} commits, {self.aborts} aborts, {self.faults} faults, {self.reads} "
            f"reads ({self.refused} refused), {self.rollbacks} rollbacks, {self.refounded} epochs "
            f"lost, {self.seconds:.0f} s; "
            f"commit skew p50 {skew[0]:.4f} p99 {skew[1]:.4f} s, "
            f"update p50 {total[0]:.3f} p99 {total[1]:.3f} s"
        )


class Violation(AssertionError):  # noqa: N818
    """A promise was broken."""
