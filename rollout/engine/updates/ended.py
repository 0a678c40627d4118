"""What became of an engine's last updates, by their ids."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import NoReturn

from rollout.errors import VersionConflict
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.messages import Begun, Decision, Seal
from rollout.weight_sync.protocol.receipts import UpdateReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an update ended that had begun; without a ``receipt`` it did not commit, and ``reason``
    says why.
    """

    begun: Begun
    receipt: UpdateReceipt | None = None
    reason: str = ""

    @property
    def committed(self) -> UpdateReceipt:
        assert self.receipt is not None
        return self.receipt

    def answer(self, decision: Decision) -> UpdateReceipt | None:
        """To a decision that comes again; ``VersionConflict`` where it is not what happened."""
        if decision.commit and self.receipt is None:
            self.refuse()
        if not decision.commit and self.receipt is not None:
            raise VersionConflict(
                f"update {decision.update_id} is live as version {self.receipt.version}"
            )
        return self.receipt

    def refuse(self) -> NoReturn:
        raise ended_without_commit(self.begun.update_id, self.reason)

    def check_same(self, seal: Seal, names: Collection[str]) -> None:
        """``VersionConflict`` where another update is sealed under this one's id.

        ``names``: the tensors whose digests are those of a receipt.
        """
        digest = total(value for name, value in seal.digests.items() if name in names)
        if self.receipt is not None and digest != self.receipt.digest:
            raise VersionConflict(
                f"update {self.begun.update_id} is live as version {self.receipt.version} with "
                "other weights; another update needs an update_id of its own"
            )


def ended_without_commit(update_id: str, reason: str) -> VersionConflict:
    return VersionConflict(
        f"update {update_id} has ended without a commit: {reason}; another attempt needs an "
        "update_id of its own"
    )


class EndedUpdates:
    """The ``kept`` last ones: an id has one outcome, whatever is asked in its name afterwards."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._outcomes: OrderedDict[str, Outcome] = OrderedDict()

    def add(self, outcome: Outcome) -> None:
        self._outcomes[outcome.begun.update_id] = outcome
        while len(self._outcomes) > self._kept:
            self._outcomes.popitem(last=False)

    def find(self, update_id: str) -> Outcome | None:
        """None for one that is open, was never begun here, or ended too long ago.

        ``VersionConflict`` with the reason for one that did not commit: an id is used once.
        """
        outcome = self._outcomes.get(update_id)
        if outcome is not None and outcome.receipt is None:
            outcome.refuse()
        return outcome

    def known(self, update_id: str) -> Outcome | None:
        """As ``find``, also of one that did not commit."""
        return self._outcomes.get(update_id)
