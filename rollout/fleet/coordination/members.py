"""All members of a fleet, as its coordinator sees them."""

from __future__ import annotations

from rollout.fleet.coordination.member import Member, Status


class Members(dict[str, Member]):
    """By name."""

    def __init__(self) -> None:
        super().__init__()
        self._named: dict[int, str] = {}  # who stood last in a life of an engine

    @property
    def serving(self) -> list[str]:
        return [m.name for m in self.values() if m.status is Status.SERVING]

    @property
    def staying(self) -> int:
        """How many are there that do not leave."""
        return sum(not member.leaves for member in self.values())

    def have_answered(self, serial: int, within: float, now: float) -> bool:
        """Whether all that were heard of within so many seconds have taken a grant behind that
        one.
        """
        there = (m for m in self.values() if m.standing and now - m.heard < within)
        return all(member.answered > serial for member in there)

    def whys(self) -> str:
        """Why those do not serve that do not."""
        out = (m for m in self.values() if m.status is not Status.SERVING)
        return "; ".join(f"{m.name}: {m.why}" for m in out)

    def is_last_holder(self, name: str, within: float, now: float) -> bool:
        """Whether one that leaves holds what is live, and of those that stay none does that was
        heard of in so many seconds: one that is silent may have ended, as may this one.
        """
        member = self.get(name)
        if member is None or not member.holds or member.gone:
            return False
        if not member.answers(2 * within, now):
            return False
        staying = [m for m in self.values() if not m.leaves]
        return bool(staying) and not any(m.holds and m.answers(within, now) for m in staying)

    def twin(self, name: str, epoch: int) -> str:
        """The member that is this engine already, under another name; "" where none is."""
        other = self.get(self._named.get(epoch, name))
        standing = None if other is None or other.name == name else other.standing
        return self._named[epoch] if standing is not None and standing.epoch == epoch else ""

    def stood(self, name: str, epoch: int) -> None:
        """A member is this engine, and no other is."""
        self._named[epoch] = name
