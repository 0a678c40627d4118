"""The leases under which members serve, as a coordinator grants them."""

from __future__ import annotations

from rollout.fleet.actions import Ask
from rollout.fleet.member import Member
from rollout.weight_sync.protocol.membership import Grant

DRIFT = 0.05  # how much faster one machine's clock may run than another's


class Leases:
    """Of ``seconds`` each, by members' own clocks, in one order: that of ``serial``. ``begun``:
    somebody may depend on what members serve.
    """

    def __init__(self, fence: int, seconds: float) -> None:
        self.seconds, self._fence = seconds, fence
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
        fence, serial, standing = self._fence, self.serial, member.standing
        if standing is None or (member.has_lease and in_doubt):
            return Ask(member.name, Grant(fence=fence, serial=serial, epoch=None))
        until = 0.0
        if member.has_lease:
            member.serves_until = max(member.serves_until, member.heard + self.counted)
            until, member.granted = standing.clock + self.seconds, serial
        grant = Grant(
            fence=fence, serial=serial, epoch=standing.epoch, until=until,
            returns=None if self.begun else standing.clock + self.seconds,
        )  # fmt: skip
        return Ask(member.name, grant)
