"""A coordinator's view of the update that is under way."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum

from rollout.fleet.coordination.actions import Action, Adapters, Ended, Promise, Tell
from rollout.weight_sync.protocol.messages import Decision


class Phase(StrEnum):
    STAGING = "staging"
    WRITING = "writing"
    COMMITTING = "committing"


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

    @property
    def is_settling(self) -> bool:
        """Whether it is decided, or about to be: what is live changes."""
        return self.phase is not Phase.STAGING

    def promised(self, live: Promise) -> Promise:
        """What is to be durable, ``live`` until now."""
        return replace(
            live,
            version=self.version,
            digest=self.digest,
            update_id=self.update_id,
            before=live.digest if self.reversible else 0,
            adapters=self.adapters,
            adapters_before=live.adapters if self.reversible else (),
        )

    def tell_commits(self, fence: int, now: float) -> list[Action]:
        """To those that have not answered."""
        self.told = now
        told = Decision(update_id=self.update_id, commit=True, fence=fence)
        return [Tell(name, told) for name, done in self.left.items() if not done]

    def aborted(self, fence: int, why: str) -> list[Action]:
        """To those that have voted, and to the trainer."""
        told = Decision(update_id=self.update_id, commit=False, fence=fence, reason=why)
        actions: list[Action] = [Tell(name, told) for name, voted in self.left.items() if voted]
        return [*actions, Ended(self.update_id, False, why, dict(self.lost))]
