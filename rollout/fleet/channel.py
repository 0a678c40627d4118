"""One update of a fleet: a member's update, fanned out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    RolloutError,
    TransferFailed,
    VersionConflict,
)
from rollout.fleet.fleet import Fleet, Link
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Seal,
    UpdateReceipt,
    UpdateRequest,
    WeightChannel,
)
from rollout.weight_sync.transports import served

AHEAD = 2  # buckets under way to every member


@dataclass(slots=True)
class _Part:
    """A member's part of the update."""

    link: Link
    channel: WeightChannel
    epoch: int = 0
    base: int = 0


@dataclass(slots=True)
class FleetChannel:
    """``WeightChannel`` to every member that serves; bytes that come with the calls go on to each.

    A member that fails drops out, as long as ``quorum`` are left; with fewer the update fails with
    the first one's error, and is aborted on all. ``record`` takes the receipt of a commit.
    """

    fleet: Fleet
    transports: Sequence[str]
    record: Callable[[UpdateReceipt], None]
    reads_in_place: bool = False
    secret: str = ""
    _parts: dict[str, _Part] = field(default_factory=dict)
    _errors: dict[str, BaseException] = field(default_factory=dict)
    _request: UpdateRequest | None = None
    _begun: Begun | None = None
    _receipt: UpdateReceipt | None = None
    _seal: Seal | None = None
    _over: bool = False
    _waiting: int = 0  # the oldest bucket that may still be under way

    def begin(self, request: UpdateRequest) -> Begun:
        fleet = self.fleet
        if self._request is not None:
            raise VersionConflict("a channel carries one update; open another")
        if request.transport not in (*self.transports, *served(self.transports)):
            raise ConfigError(
                f"transport {request.transport!r:.80} does not lead to a fleet; it takes "
                f"{', '.join(served(self.transports))}"
            )
        if request.staging == "none":
            raise ConfigError("a fleet's members have to be prepared: staging='none' cannot be")
        if request.in_flight == "wait":
            raise ConfigError(
                "a fleet's members drain within their leases or not at all: in_flight='wait' is "
                "for one engine; use keep, recompute or abort"
            )
        live = (fleet.epoch, fleet.version)
        if request.base is not None and tuple(request.base) != live:
            raise VersionConflict(
                f"built on (epoch, version) {tuple(request.base)}, but {live} is live"
            )
        links, version = fleet.begin(request.update_id, request.version)
        self._request = replace(request, version=version)
        self._parts = {link.name: _Part(link, link.client.open()) for link in links}
        self._each(self._begin_part)
        self._begun = Begun(
            update_id=request.update_id, epoch=live[0], base_version=live[1], version=version
        )
        return self._begun

    def room(self, nbytes: int) -> Tensor | None:
        return None

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        while header.index - self._waiting >= AHEAD and self._request is not None:
            self.wait(self._waiting, self._request.timeout)

        def announce(part: _Part) -> None:
            part.channel.bucket(header, payload)

        self._each(announce, at_once=False)  # none of them waits

    def wait(self, index: int, timeout: float) -> None:
        self._each(lambda part: part.channel.wait(index, timeout))
        self._waiting = max(self._waiting, index + 1)

    def seal(self, seal: Seal) -> None:
        fleet, request = self.fleet, self._live()
        if seal.fence is not None:
            raise VersionConflict("a fleet decides by itself: an update of one cannot be prepared")
        digest = self._digest_after(seal)

        def vote(part: _Part) -> None:
            part.channel.seal(replace(seal, fence=fleet.fence))
            fleet.voted(request.update_id, part.link.name, digest)

        self._seal = seal
        self._each(vote)

    def commit(self) -> UpdateReceipt:
        if self._receipt is not None:
            return self._receipt
        request, fleet = self._live(), self.fleet
        if self._seal is None:
            raise VersionConflict("commit before seal")
        fleet.commit(request.update_id)
        limit = 6 * request.timeout + 2 * fleet.lease
        try:
            ended = fleet.outcome(request.update_id).result(limit)
        except FutureTimeout:
            raise DeadlineExceeded(
                f"the fleet's commit of version {request.version} is decided, but its end was not "
                f"seen within {limit:g} s; members() tells who holds it"
            ) from None
        if not ended.committed:
            self._fail(ended.reason)
        self._over = True
        self._receipt = self._receipt_of(request)
        self.record(self._receipt)
        return self._receipt

    def abort(self, reason: str) -> None:
        if self._over or self._request is None:
            return
        self.fleet.give_up(self._request.update_id, reason)
        for part in self._parts.values():
            part.channel.abort(reason)

    def close(self) -> None:
        self.abort("the channel was closed before the commit")
        for part in self._parts.values():
            part.channel.close()

    # ---- helpers ----

    def _begin_part(self, part: _Part) -> None:
        request = self._live()
        info = part.link.client.info()
        begun = part.channel.begin(
            replace(
                request,
                base=None if request.base is None else (info.epoch, info.version),
                # The trainer's own stream ends here: one of ours brings each member its bytes.
                transport=request.transport if request.transport == "ipc" else "inline",
                offer=request.offer if request.transport == "ipc" else {},
            )
        )
        part.epoch, part.base = begun.epoch, begun.base_version

    def _live(self) -> UpdateRequest:
        if self._request is None:
            raise VersionConflict("no update has begun")
        outcome = self.fleet.outcome(self._request.update_id)
        if outcome.done() and not outcome.result().committed:
            self._fail(outcome.result().reason)
        return self._request

    def _each(self, fn: Callable[[_Part], None], *, at_once: bool = True) -> None:
        """``fn`` of every member that is left; those that fail drop out."""
        request = self._live()
        parts = dict(self._parts)
        if at_once:
            links = [part.link for part in parts.values()]
            results = self.fleet.each(links, lambda link: fn(parts[link.name]))
        else:
            results = {name: _error_of(fn, part) for name, part in parts.items()}
        failed = {n: e for n, e in results.items() if isinstance(e, BaseException)}
        self._errors.update(failed)
        for name, error in failed.items():
            self._parts.pop(name).channel.close()
            self.fleet.lost(request.update_id, name, str(error))
        if failed:
            self._live()

    def _fail(self, reason: str) -> None:
        """The update has failed: by the error that its members gave, if they did."""
        for part in self._parts.values():
            part.channel.close()
        self._over = True
        for name, error in self._errors.items():
            if isinstance(error, RolloutError):
                more = f" ({reason})" if len(self._errors) > 1 else ""
                raise type(error)(f"member {name}: {error}{more}") from error
            raise error
        raise TransferFailed(f"the update of the fleet was aborted: {reason}")

    def _digest_after(self, seal: Seal) -> int:
        """Of all that members will hold."""
        request = self._live()
        part = next(iter(self._parts.values()))
        names = {meta.name for meta in part.link.client.info().tensors}
        sent = {name: value for name, value in seal.digests.items() if name in names}
        if request.partial:
            sent = {**part.link.client.digests(request.timeout), **sent}
        return total(sent.values())

    def _receipt_of(self, request: UpdateRequest) -> UpdateReceipt:
        """One receipt of all members', which names each."""
        futures = {
            name: part.link.receipts.setdefault(request.update_id, Future())
            for name, part in self._parts.items()
        }
        # Those that were slower than their lease are fenced, and commit nevertheless.
        wait(futures.values(), request.timeout, return_when=FIRST_COMPLETED)
        found = {name: future.result() for name, future in futures.items() if future.done()}
        if not found:
            raise TransferFailed(
                f"version {request.version} is committed, but no member that holds it is left"
            )
        first = next(iter(found.values()))
        times = {k: max(r.timings.get(k, 0.0) for r in found.values()) for k in first.timings}
        rows = [replace(rank, rank=0) for one in found.values() for rank in one.ranks]
        members = dict.fromkeys(found, "committed")
        members |= {n: "committed, its receipt was lost" for n in self._parts if n not in found}
        members |= {n: f"fenced: {error}"[:300] for n, error in self._errors.items()}
        return replace(
            first,
            epoch=self.fleet.epoch,
            timings=times,
            ranks=tuple(replace(row, rank=n) for n, row in enumerate(rows)),
            transport=request.transport,
            details={**first.details, "members": members},
        )


def _error_of(fn: Callable[[_Part], Any], part: _Part) -> BaseException | None:
    try:
        fn(part)
    except Exception as error:  # noqa: BLE001 - it is one member's, and told as such
        return error
    return None
