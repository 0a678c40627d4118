"""A coordinator's view of one member."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from rollout.weight_sync.protocol.membership import Standing

NEW = "it has not been heard of yet"
HAS_LEFT = "it left"


class Status(StrEnum):
    JOINING = "joining"
    SERVING = "serving"
    FENCED = "fenced"
    LEAVING = "leaving"
    LEFT = "left"


@dataclass(slots=True)
class Member:
    """``serves_until``: it serves no more from then on, whatever it has heard. ``holds``: whether
    it is known to have the fleet's live weights. ``busy``: an answer to ``Check`` or ``Fill`` is
    due.
    """

    name: str
    status: Status = Status.JOINING
    standing: Standing | None = None
    heard: float = 0.0
    answered: int = 0  # the last grant
    granted: int = 0  # the last grant by which it may serve
    asked: float = float("-inf")
    serves_until: float = float("-inf")
    holds: bool = False
    busy: bool = False
    behind: bool = False  # it needs what is live, from another or by the next update
    fails: int = 0  # attempts in a row to bring it up to date
    failed: str = ""  # how the last of them did
    not_before: float = float("-inf")  # the next of them
    why: str = NEW
    gone: bool = False  # its process has ended
    unfit: str = ""  # why nothing can be done about it in this life

    @property
    def leaves(self) -> bool:
        """Whether it is about to end, or has: in this life it comes back no more."""
        return self.status in (Status.LEAVING, Status.LEFT)

    @property
    def has_lease(self) -> bool:
        return self.status in (Status.SERVING, Status.LEAVING)

    def answers(self, within: float, now: float) -> bool:
        """Whether it was heard of in so many seconds, or is about to answer."""
        return self.busy or now - self.heard < within

    @property
    def is_new(self) -> bool:
        """Whether it may serve within moments: nothing is known against it."""
        return self.why == NEW


def describe(members: Iterable[Member]) -> list[dict[str, object]]:
    """Rows for people: who is there, and why not serving."""
    return [
        {
            "name": m.name,
            "status": str(m.status),
            "state": None if m.standing is None else m.standing.state,
            "version": None if m.standing is None else m.standing.version,
            "running": None if m.standing is None else m.standing.running,
            "waiting": None if m.standing is None else m.standing.waiting,
            "why": m.why,
        }
        for m in members
    ]


def standing(rows: Iterable[Mapping[str, object]]) -> dict[str, str]:
    """Of the rows of ``describe``, a line by name."""
    return {
        str(row["name"]): f"{row['status']}, version {row['version']}"
        + (f": {row['why']}" if row["why"] else "")
        for row in rows
    }


def said(whys: Mapping[str, object]) -> str:
    """What members say, each thing once, behind the names of those who say it."""
    who: dict[str, list[str]] = {}
    for name, why in whys.items():
        who.setdefault(str(why), []).append(name)
    return "; ".join(
        f"{'members' if len(names) > 1 else 'member'} {', '.join(names)}: {text}"
        for text, names in who.items()
    )
