"""A coordinator's view of one member, and of the update that is under way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rollout.fleet.actions import Adapters
from rollout.weight_sync.protocol.membership import Standing

NEW = "it has not been heard of yet"
HAS_LEFT = "it left"


class Status(StrEnum):
    JOINING = "joining"
    SERVING = "serving"
    FENCED = "fenced"
    LEAVING = "leaving"
    LEFT = "left"


class Phase(StrEnum):
    STAGING = "staging"
    WRITING = "writing"
    COMMITTING = "committing"


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
    not_before: float = float("-inf")  # the next of them
    why: str = NEW
    gone: bool = False  # its process has ended

    @property
    def leaves(self) -> bool:
        """Whether it is about to end, or has: in this life it comes back no more."""
        return self.status in (Status.LEAVING, Status.LEFT)

    @property
    def has_lease(self) -> bool:
        return self.status in (Status.SERVING, Status.LEAVING)

    @property
    def is_new(self) -> bool:
        """Whether it may serve within moments: nothing is known against it."""
        return self.why == NEW


@dataclass(slots=True)
class Update:
    """``left``: members that take part still, whether they serve or join by it, and whether each
    has voted (once written: has committed). ``lost``: why the others do not. ``wanted``: the
    trainer asks for the commit. ``back``: it is a rollback. ``reversible``: one may come after it.
    ``digest``: of all that is held then, and of it ``adapters``.
    """

    update_id: str
    version: int
    left: dict[str, bool]
    phase: Phase = Phase.STAGING
    back: bool = False
    reversible: bool = True
    wanted: bool = False
    digest: int = 0
    adapters: Adapters = ()
    lost: dict[str, str] = field(default_factory=dict)
    written: float = float("-inf")
    told: float = float("-inf")


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
