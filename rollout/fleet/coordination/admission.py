"""How a member that does not serve comes to: it is looked at, and gets what it lacks."""

from __future__ import annotations

import zlib
from collections.abc import Collection

from rollout.fleet.coordination.actions import Action, Check, Fill, Promise
from rollout.fleet.coordination.member import Member, Status
from rollout.fleet.coordination.members import Members

KEPT_OUT = (2, 6)  # attempts to bring a member up to date, from and below which it is kept out
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0  # seconds before a member is brought up to date again


class Admission:
    """Who of ``members`` gets what is live, and from whom. ``lease``: seconds of a grant."""

    def __init__(self, members: Members, lease: float) -> None:
        self._members, self._lease = members, lease

    def is_ready(self, member: Member) -> bool:
        """Whether something can be done about it now."""
        standing = member.standing
        if standing is None or member.leaves:
            return False
        if member.unfit:
            member.why = member.unfit
            return False
        if standing.state not in ("running", "fenced", "paused", "asleep") or member.busy:
            member.why = member.why if member.busy else f"it is {standing.state}"
            return False
        return True

    def bring_up(
        self, member: Member, live: Promise, taken: Collection[str], now: float
    ) -> list[Action]:
        """The next step of one that is ready. ``taken``: the members that an update keeps busy."""
        standing = member.standing
        assert standing is not None
        if standing.version == live.version:
            member.busy = True
            return [Check(member.name)]
        if standing.version > live.version:
            member.why = (
                f"its version {standing.version} is above the fleet's {live.version}: it was "
                "updated at its own address (restart it), or this front has another --record than "
                "the fleet had, a new or an older one (start it with that of the fleet)"
            )
            return []
        return self._fill(member, live, taken, now)

    def keeps(self, member: Member, live: Promise, now: float) -> bool:
        """Whether one that leaves, or has left, answers still and may hold what is live."""
        standing = member.standing
        if not member.leaves or member.gone or standing is None:
            return False
        return member.answers(2 * self._lease, now) and standing.version == live.version

    def joining(self, live: Promise, now: float) -> list[str]:
        """Who can take part in an update of all that members hold, and does not serve."""
        return [m.name for m in self._behind(live, now)]

    def kept_out(self, live: Promise, now: float) -> list[str]:
        """Members that several others could not bring up to date, as where one update follows the
        next: they need one that is whole. One that has had its chances needs something else.
        """
        return [m.name for m in self._behind(live, now) if KEPT_OUT[0] <= m.fails < KEPT_OUT[1]]

    def brings_up(self, live: Promise, now: float) -> bool:
        """Whether another is bringing a member up to date, or can once no update is under way; one
        that several could not is not counted.
        """
        fresh = (m for m in self._behind(live, now) if m.fails < KEPT_OUT[0])
        return any(m.busy or (self.is_ready(m) and now >= m.not_before) for m in fresh)

    def failed(self, name: str, why: str, now: float) -> None:
        """It could not be brought up to date: it is tried again later each time, and by another."""
        if (member := self._members.get(name)) is not None:
            member.not_before = now + _back_off(name, member.fails)
            member.fails += 1
            member.failed = why

    def _behind(self, live: Promise, now: float) -> list[Member]:
        return [m for m in self._members.values() if self._may_join(m, live, now)]

    def _may_join(self, member: Member, live: Promise, now: float) -> bool:
        """Whether a member can take part in an update that does not serve: it is there, and behind;
        who is bringing it up to date gives way to the update.
        """
        standing = member.standing
        if standing is None or member.leaves or member.unfit or member.status is Status.SERVING:
            return False
        if standing.prepared and not member.holds:
            return False  # by what was last heard; one that holds what is live has committed since
        heard = member.answers(2 * self._lease, now)
        return member.behind and heard and standing.version < live.version

    def _fill(
        self, member: Member, live: Promise, taken: Collection[str], now: float
    ) -> list[Action]:
        """From one that serves and that no update keeps busy, which the copy would give way to; as
        a last resort from one that leaves.
        """
        member.behind = True
        if member.name in taken:
            member.why = "it takes part in the update under way"
            return []
        if now < member.not_before:
            return []
        donors = [self._members[name] for name in self._members.serving if name not in taken]
        if taken and not donors:
            member.why = "it is brought up to date when the update under way has ended"
            return []
        donors = donors or [m for m in self._members.values() if self.keeps(m, live, now)]
        if not donors:
            return []
        donor = donors[member.fails % len(donors)]
        if not donor.holds:  # only an earlier coordinator knew that it does
            return self._look_at(donor, now)
        again = f" once more; {member.failed}" if member.fails else ""
        member.busy, member.why = True, f"it is being brought up to date{again}"
        return [Fill(member.name, donor.name, live.version)]

    @staticmethod
    def _look_at(donor: Member, now: float) -> list[Action]:
        if donor.busy or now < donor.not_before:
            return []
        donor.busy, donor.not_before = True, now + LONGEST_PAUSE
        return [Check(donor.name)]


def _back_off(name: str, fails: int) -> float:
    """Seconds: twice as many each time, of which a part that differs by member is left out."""
    spread = zlib.crc32(f"{name} {fails}".encode()) / 2**32
    return min(FIRST_PAUSE * 2.0 ** min(fails, 10), LONGEST_PAUSE) * (1 - spread / 2)
