"""Every member of a fleet goes back to the version before the last commit, or none does."""

from __future__ import annotations

import uuid

from rollout.fleet.fleet import Fleet
from rollout.fleet.link import Link
from rollout.fleet.updates.transaction import Transaction
from rollout.fleet.updates.update_log import UpdateLog
from rollout.weight_sync.protocol.membership import PrepareRollback
from rollout.weight_sync.protocol.receipts import UpdateReceipt


def roll_back(fleet: Fleet, log: UpdateLog, timeout: float) -> UpdateReceipt:
    """As an update whose bytes the members have: they vote by what they would go back to.

    A member that would go back to something else, as one that joined since, is fenced at the
    commit and brought up to date by another. Raises the first one's error, most often a
    ``VersionConflict``, where fewer than the quorum are left.
    """
    transaction = Transaction(fleet, log)
    version = transaction.begin(uuid.uuid4().hex, None, timeout, back=True)
    live, update_id = fleet.promise, transaction.update_id
    digest, adapters = live.before, live.adapters_before

    def vote(link: Link) -> None:
        link.client.prepare_rollback(
            PrepareRollback(
                update_id=update_id, version=version, digest=digest, fence=live.fence,
                timeout=timeout,
            )
        )  # fmt: skip
        fleet.voted(update_id, link.name, digest, adapters)

    try:
        transaction.each(vote)
        return transaction.commit("rollback")
    except BaseException as error:
        transaction.give_up(str(error))
        raise
