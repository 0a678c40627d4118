"""What the log says of members: who serves, why others do not, and what none holds any more."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from rollout.fleet.coordination.actions import Promise
from rollout.fleet.coordination.member import Member, Status

log = logging.getLogger(__name__)
PAUSE = 10.0  # seconds between two lines of one member that stays out of service


@dataclass(slots=True)
class _Said:
    why: str = ""
    at: float = float("-inf")
    serves: bool = False
    warned: bool = False


class MemberLog:
    """A line for each change; for one thing and member not twice."""

    def __init__(self) -> None:
        self._said: dict[str, _Said] = {}
        self._live: Promise | None = None

    def look(self, members: Iterable[Member], live: Promise, now: float) -> None:
        """As ``members`` are at ``now``, in seconds of the caller's monotonic clock; ``live``: what
        all of them are to hold.
        """
        self._is_live(live)
        before, self._said = self._said, {}
        for member in members:
            said = self._said[member.name] = before.get(member.name) or _Said()
            if member.status is Status.SERVING:
                self._serves(member, said)
            elif said.serves or (member.why != said.why and now - said.at >= PAUSE):
                self._does_not(member, said, now)

    def _is_live(self, live: Promise) -> None:
        before, self._live = self._live, live
        if before is not None and before.epoch != live.epoch and before.version != live.version:
            log.error(
                "no member holds version %s any more: version %s serves, which this front has not "
                "committed, under epoch %s; send a full update",
                before.version, live.version, live.epoch,
            )  # fmt: skip

    def _serves(self, member: Member, said: _Said) -> None:
        if not said.serves:
            level = logging.WARNING if said.warned else logging.INFO
            version = None if member.standing is None else member.standing.version
            log.log(level, "member %s serves version %s", member.name, version)
        said.serves, said.warned, said.why, said.at = True, False, "", float("-inf")

    def _does_not(self, member: Member, said: _Said, now: float) -> None:
        said.serves = False
        if member.is_new:
            return
        if not member.busy:  # else it is on its way
            log.warning("member %s does not serve: %s", member.name, member.why)
            said.warned = True
        said.why, said.at = member.why, now
