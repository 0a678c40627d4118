"""A model of an engine, as far as a fleet's updates and leases go; see ``simulator``."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.errors import EngineRestarted, RolloutError
from rollout.weight_sync.protocol.membership import Grant, Standing
from rollout.weight_sync.protocol.messages import Decision

KEPT = 64  # updates whose end a member remembers


@dataclass(frozen=True, slots=True)
class Staged:
    """What a member has voted for; ``back``: it would go back to it, without any bytes."""

    update_id: str
    version: int
    digest: int
    back: bool = False


@dataclass(slots=True)
class SimulatedMember:
    """One life of an engine: one version live, what was live before it, at most one prepared.

    ``rate``: of its clock; ``ahead``: seconds by which that has jumped. ``up``: whether it runs;
    ``dead``: it never will, another comes in its place. ``leaving``: it is about to end. ``cut``:
    no message reaches it or leaves it; ``mute``: none leaves it. ``until``: the end of its lease,
    by its clock. ``heard``: when an answer of it arrived last. What it refuses is a
    ``RolloutError``.
    """

    name: str
    epoch: int
    rate: float
    version: int = 0
    digest: int = 1
    before: int | None = None  # the digest that it could go back to
    fence: int = 0
    up: bool = True
    dead: bool = False
    leaving: bool = False
    cut: bool = False
    mute: bool = False
    ahead: float = 0.0
    heard: float = 0.0
    until: float | None = None
    newest: tuple[int, int] = (0, 0)  # grant
    prepared: Staged | None = None
    ended: dict[str, bool] = field(default_factory=dict)

    def clock(self, now: float) -> float:
        return 1000.0 + self.ahead + now * self.rate

    def serves(self, now: float) -> bool:
        return self.up and (self.until is not None and self.clock(now) < self.until)

    def grant(self, grant: Grant, now: float) -> Standing:
        self._see(grant.fence)
        if grant.epoch is not None and grant.epoch != self.epoch:
            raise EngineRestarted("another life")
        if grant.epoch is not None and (grant.fence, grant.serial) >= self.newest:
            self.until, self.newest = grant.until, (grant.fence, grant.serial)
        state = "leaving" if self.leaving else "running" if self.serves(now) else "fenced"
        return Standing(
            epoch=self.epoch, clock=self.clock(now), version=self.version, state=state,
            prepared="" if self.prepared is None else self.prepared.update_id,
            fence=self.fence,
        )  # fmt: skip

    def vote(self, staged: Staged, fence: int) -> None:
        """Be prepared; staging overwrites what a rollback would bring back."""
        self._see(fence)
        if self.prepared is not None or self.version >= staged.version:
            raise RolloutError("it cannot take part")
        if staged.back and self.before != staged.digest:
            raise RolloutError("it would go back to something else")
        if not staged.back:
            self.before = None
        self.prepared = staged

    def decide(self, decision: Decision) -> bool:
        """Whether it has gone live by this; False where it had before, or was told not to."""
        assert decision.fence is not None
        self._see(decision.fence)
        ended = self.ended.get(decision.update_id)
        if ended is not None:
            if ended is not decision.commit:
                raise RolloutError("it ended the other way")
            return False
        prepared = self.prepared
        if prepared is None or prepared.update_id != decision.update_id:
            raise RolloutError("not prepared")
        self.prepared = None
        self.ended[decision.update_id] = decision.commit
        if len(self.ended) > KEPT:
            del self.ended[next(iter(self.ended))]
        if decision.commit:
            self._go_live(prepared)
        return decision.commit

    def fill(self, donor: SimulatedMember, version: int) -> None:
        """Take the live version of another."""
        if not donor.up or donor.cut or donor.version != version:
            raise RolloutError("the donor has gone on")
        if self.prepared is not None or self.version >= version:
            raise RolloutError("not now")
        self._go_live(Staged("", donor.version, donor.digest))

    def _go_live(self, staged: Staged) -> None:
        self.before = None if staged.back else self.digest
        self.version, self.digest = staged.version, staged.digest

    def _see(self, fence: int) -> None:
        if fence < self.fence:
            raise RolloutError("stale fence")
        self.fence = fence
