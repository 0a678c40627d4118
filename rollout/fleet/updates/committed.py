"""Updates of a fleet that are committed, for those that come again."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from rollout.errors import EngineError, VersionConflict
from rollout.fleet.directory import Directory
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.messages import Begun, Seal
from rollout.weight_sync.protocol.receipts import UpdateReceipt

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """An update that is over; ``sealed``: the sum of the digests that it was sealed with."""

    begun: Begun
    sealed: int
    receipt: UpdateReceipt

    def check_same(self, seal: Seal) -> None:
        if total(seal.digests.values()) != self.sealed:
            raise VersionConflict(
                f"update {self.begun.update_id} is committed as version {self.receipt.version} "
                "with other weights; another update needs an update_id of its own"
            )


class CommittedUpdates:
    """The ``kept`` last ones by their ids: one that comes again is answered by what it did."""

    def __init__(self, kept: int) -> None:
        self._kept = kept
        self._found: dict[str, Committed] = {}

    def find(self, update_id: str) -> Committed | None:
        return self._found.get(update_id)

    def add(self, update: Committed) -> None:
        self._found[update.begun.update_id] = update
        while len(self._found) > self._kept:
            del self._found[next(iter(self._found))]


def live_receipt(fleet: Directory, update_id: str) -> UpdateReceipt | None:
    """What a member that serves has kept of the live update, as when a front has started anew.

    None where none has it; ``EngineClosed`` where none serves. It names no members.
    """
    fleet.one()
    for link in fleet.serving():
        try:
            kept = link.client.receipts()
        except EngineError as error:
            log.info("member %s did not answer: %s", link.name, error)
            continue
        for receipt in kept:
            if receipt.update_id == update_id:
                return replace(receipt, epoch=fleet.epoch)
    return None
