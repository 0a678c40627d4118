"""The leases under which members serve, as a coordinator grants them."""

from __future__ import annotations

from dataclasses import replace

from rollout.fleet.coordination.actions import Ask
from rollout.fleet.coordination.member import Member
from rollout.weight_sync.protocol.membership import Grant

DRIFT = 0.05  # how much faster one machine's clock may run than another's


class Leases:
    """Of ``seconds`` each, by members' own clocks, in one order: that of ``serial``. ``begun``:
    somebody may depend on what members serve. ``fence`` and ``fleet``: of the coordinator.
    """

    def __init__(self, fence: int, fleet: int, seconds: float) -> None:
        self.seconds, self._fence, self._fleet = seconds, fence, fleet
        self.serial = 0  # of the last grant
        self.begun = False

    @property
    def counted(self) -> float:
        """Seconds of a lease by the slowest clock."""
        return self.seconds * (1 + DRIFT)

    def ask(self, member: Member, now: float, *, in_doubt: bool) -> Ask:
        """The next grant: none without a reading of its clock, nor where it may not serve, or may
        be about to (``in_doubt``).
        """
        member.asked = now
        self.serial += 1
        standing = member.standing
        grant = Grant(fence=self._fence, fleet=self._fleet, serial=self.serial, epoch=None)
        if standing is None or (member.has_lease and in_doubt):
            return Ask(member.name, grant)
        until = 0.0
        if member.has_lease:
            member.serves_until = max(member.serves_until, member.heard + self.counted)
            until, member.granted = standing.clock + self.seconds, self.serial
        returns = None if self.begun else standing.clock + self.seconds
        grant = replace(grant, epoch=standing.epoch, until=until, returns=returns)
        return Ask(member.name, grant)
