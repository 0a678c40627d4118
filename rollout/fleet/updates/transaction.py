"""What every change of a fleet's weights has in common: who takes part, their votes, one end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, NoReturn

from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    EngineOverloaded,
    EngineRestarted,
    LimitExceeded,
    RolloutError,
    TransferFailed,
    WorkerDied,
)
from rollout.fleet.coordination.actions import Ended
from rollout.fleet.coordination.member import HAS_LEFT, said
from rollout.fleet.fleet import Fleet
from rollout.fleet.link import Link
from rollout.fleet.updates.update_log import UpdateLog
from rollout.weight_sync.protocol.receipts import UpdateReceipt

LOST = (EngineClosed, EngineRestarted, WorkerDied)
REFUSALS = (ConfigError, EngineOverloaded, LimitExceeded)  # of the request: the member is well


class Transaction:
    """One of them, on the members that serve as it begins.

    A member that fails drops out, as long as ``quorum`` are left; with fewer, or where one refuses
    the request itself, it fails with the first one's error, and is aborted on all. ``log`` is told
    of its end; ``record`` of a commit; ``let_go`` is called with the name of a member that has
    dropped out, or whose part is over.
    """

    def __init__(
        self,
        fleet: Fleet,
        log: UpdateLog,
        let_go: Callable[[str], None] = lambda name: None,
        record: Callable[[UpdateReceipt], None] = lambda receipt: None,
    ) -> None:
        self._fleet, self._log, self._let_go, self._record = fleet, log, let_go, record
        self._errors: dict[str, BaseException] = {}
        self._over = self._counted = False
        self.links: dict[str, Link] = {}
        self.update_id, self.version, self.timeout = "", 0, 0.0

    def begin(
        self,
        update_id: str,
        version: int | None,
        timeout: float,
        *,
        back: bool = False,
        reversible: bool = True,
        joins: bool = False,
    ) -> int:
        """The version that it will make, once no other is under way; ``back``: it is a rollback,
        which may follow what is ``reversible``; ``joins``: members that are behind join by it.
        """
        links, version = self._fleet.begin(
            update_id, version, timeout, back=back, reversible=reversible, joins=joins
        )
        self.links = {link.name: link for link in links}
        self.update_id, self.version, self.timeout = update_id, version, timeout
        return version

    def check(self) -> None:
        """Raises what it has failed by, if it has."""
        outcome = self._fleet.outcome(self.update_id)
        if outcome.done() and not outcome.result().committed:
            self._fail(outcome.result())

    def each(
        self,
        fn: Callable[[Link], Any],
        *,
        at_once: bool = True,
        begins: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        """``fn`` of every member that is left (of ``only``); those that fail drop out.

        ``begins``: it opens the update, which one member's refusal of the request ends for all.
        """
        self.check()
        links = {n: link for n, link in self.links.items() if only is None or n in only}
        if at_once:
            results = self._fleet.each(links.values(), fn, self.update_id, self.timeout)
        else:
            results = {name: _error_of(fn, link) for name, link in links.items()}
        failed = {n: e for n, e in results.items() if isinstance(e, BaseException)}
        of_members = {n: e for n, e in failed.items() if not self.links[n].joins}
        refused = {n: e for n, e in of_members.items() if begins and isinstance(e, REFUSALS)}
        self._errors = {**refused, **self._errors, **of_members}
        if refused:
            self._fleet.give_up(self.update_id, said(refused))
            self._fail(Ended(self.update_id, False, said(refused)))
        for name, error in failed.items():
            del self.links[name]
            self._let_go(name)
            self._fleet.lost(self.update_id, name, str(error))
        self.check()

    def commit(self, transport: str, **details: Any) -> UpdateReceipt:
        """Once all that are left have voted: the receipt, which names every member, and says
        ``details``.
        """
        with self._fleet.committing():
            return self._commit(transport, details)

    def _commit(self, transport: str, details: Mapping[str, Any]) -> UpdateReceipt:
        fleet = self._fleet
        self.check()
        fleet.commit(self.update_id)
        limit = 6 * self.timeout + 2 * fleet.lease
        try:
            ended = fleet.outcome(self.update_id).result(limit)
        except FutureTimeout:
            self._counted = True  # whether it has failed, nobody knows
            raise DeadlineExceeded(
                f"the fleet's commit of version {self.version} is decided, but its end was not "
                f"seen within {limit:g} s; members() tells who holds it"
            ) from None
        if not ended.committed:
            self._fail(ended)
        self._over = True
        receipt = self._receipt(transport, ended.lost, details)
        self._log.committed(receipt)
        self._record(receipt)
        return receipt

    def give_up(self, reason: str, *, counts: bool = True) -> bool:
        """Abort it on all; False where it was over, or never begun. ``counts``: as a failure."""
        if self._over or not self.update_id:
            return False
        self._fleet.give_up(self.update_id, reason)
        if counts:
            self._failed(reason)
        return True

    # ---- helpers ----

    def _fail(self, ended: Ended) -> NoReturn:
        """By the error that its members gave, if they did: of the first one's kind."""
        for name in self.links:
            self._let_go(name)
        self._over = True
        first = next(iter(self._errors.values()), None)
        error: BaseException
        serves = f"; the fleet's version {self._fleet.version} serves on"
        if first is None:
            error = TransferFailed(f"the update of the fleet was aborted: {ended.reason}{serves}")
        elif isinstance(first, RolloutError):
            # That a member is gone does not mean that the fleet is closed.
            kind = TransferFailed if isinstance(first, LOST) else type(first)
            told = said({**ended.lost, **self._errors})
            error = kind(told + serves if kind is TransferFailed else told)
        else:
            error = first
        if not isinstance(first, ConfigError):  # as one engine, which may be asked in another way
            self._failed(str(error))
        raise error from (first if error is not first else None)

    def _failed(self, reason: str) -> None:
        if not self._counted:
            self._counted = True
            self._log.failed(self.update_id, reason)

    def _receipt(
        self, transport: str, lost: Mapping[str, str], details: Mapping[str, Any]
    ) -> UpdateReceipt:
        """One receipt of all members'."""
        futures = {
            name: link.receipts.setdefault(self.update_id, Future())
            for name, link in self.links.items()
        }
        # Those that were slower than their lease are fenced, and commit nevertheless.
        wait(futures.values(), self.timeout, return_when=FIRST_COMPLETED)
        answers = {name: future.result() for name, future in futures.items() if future.done()}
        found = {name: receipt for name, (_, receipt) in answers.items()}
        if not found:
            raise TransferFailed(
                f"version {self.version} is committed, but no member that holds it is left"
            )
        first = next(iter(found.values()))
        answered = [when for when, _ in answers.values()]
        times = {k: max(r.timings.get(k, 0.0) for r in found.values()) for k in first.timings}
        rows = [replace(rank, rank=0) for one in found.values() for rank in one.ranks]
        members = dict.fromkeys(found, "committed")
        members |= {n: "committed, its receipt was lost" for n in self.links if n not in found}
        fenced = {n: why for n, why in lost.items() if n not in found} | self._errors
        members |= {n: f"fenced: {why}"[:300] for n, why in fenced.items()}
        members |= {n: "left" for n, why in lost.items() if why == HAS_LEFT and n not in found}
        absent = ((str(row["name"]), row["why"]) for row in self._fleet.members())
        members |= {n: f"took no part: {why}"[:300] for n, why in absent if n not in members}
        return replace(
            first,
            epoch=self._fleet.epoch,
            timings=times,
            ranks=tuple(replace(row, rank=n) for n, row in enumerate(rows)),
            transport=transport,
            details={
                **first.details,
                **details,
                "members": members,
                "commit_skew_seconds": f"{max(answered) - min(answered):.6f}",
            },
        )


def _error_of(fn: Callable[[Link], Any], link: Link) -> BaseException | None:
    try:
        fn(link)
    except Exception as error:  # noqa: BLE001 - it is one member's, and told as such
        return error
    return None
