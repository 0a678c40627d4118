"""One update of a fleet: a member's update, fanned out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from rollout.distributed.futures import resolve
from rollout.errors import ConfigError, DeadlineExceeded, TransferFailed, VersionConflict, some
from rollout.fleet.coordination.actions import Adapters
from rollout.fleet.fleet import Fleet
from rollout.fleet.updates.committed import Committed, CommittedUpdates
from rollout.fleet.updates.hosts import CardMemory, HostMemory, Part, card_of, nobody_maps
from rollout.fleet.updates.transaction import Transaction
from rollout.fleet.updates.update_log import UpdateLog
from rollout.fleet.updates.ways import AHEAD, CARD, FRONT, followers, ways
from rollout.weight_sync.protocol.adapters import HeldAdapter, adapter_digest, digest_of_all
from rollout.weight_sync.protocol.digests import MASK, total
from rollout.weight_sync.protocol.link import StreamOffer
from rollout.weight_sync.protocol.messages import Begun, BucketHeader, Seal, UpdateRequest
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports import served
from rollout.weight_sync.transports.cuda_ipc import SharedAllocation
from rollout.weight_sync.transports.host import host_id
from rollout.weights.components import adapter_component, component_of
from rollout.wire.codec import to_plain

SILENT, TRY_AGAIN = 2.0, 600.0  # seconds: no answer to a feed for so long is not asked for again
JOIN_WAIT = 5.0  # seconds until a member that joins by it takes the update, or is left out

T = TypeVar("T")


class FleetChannel:
    """``WeightChannel`` to every member that serves; bytes that come with the calls go on to each.

    See ``Transaction`` for members that fail. ``log`` is told how it ends. ``names``:
    of all tensors that a member holds. ``updates``: those that this front has committed.
    """

    reads_in_place = False
    secret = ""

    def __init__(
        self,
        fleet: Fleet,
        transports: Sequence[str],
        log: UpdateLog,
        names: Collection[str],
        updates: CommittedUpdates,
    ) -> None:
        self.fleet, self._transports, self._names = fleet, transports, names
        self._transaction = Transaction(fleet, log, self._let_go, self._record)
        self._updates = updates
        self._log = log
        self._parts: dict[str, Part] = {}
        self._memory = HostMemory()
        self._card: CardMemory | None = None  # of an update by a GPU's memory
        self._left: dict[int, tuple[BucketHeader, Tensor | None]] = {}  # not with all members yet
        self._sent: dict[str, int] = {}  # bytes from the front, by member
        self._asked: UpdateRequest | None = None  # as it came, for a begin that is repeated
        self._request: UpdateRequest | None = None
        self._begun: Begun | None = None
        self._replays: Committed | None = None  # whose id came once more
        self._receipt: UpdateReceipt | None = None
        self._seal: Seal | None = None
        self._closed = self._aborted = False
        self._waiting = 0  # the oldest bucket that may still be under way
        self._lock = threading.RLock()  # at a time, where trainer ranks have a stream each

    def begin(self, request: UpdateRequest) -> Begun:
        if self._begun is not None and request == self._asked:
            return self._begun
        if self._asked is not None:
            raise VersionConflict("a channel carries one update; open another")
        self._check(request)
        if request.base is not None and (late := self.fleet.kept_out()):
            raise VersionConflict(  # who sends changes sends everything then
                f"{some(late)}: updates follow each other too closely to bring it up to date; "
                "whole weights do so by themselves"
            )
        self._asked = request
        version = self._turn(request)
        self._begun = (
            self._begin(request, version) if self._replays is None else self._replays.begun
        )
        return self._begun

    def _turn(self, request: UpdateRequest) -> int:
        """Wait for it; the version that the update will make, unless its id has one already, which
        it may have got while we waited.
        """
        find, update_id = self._updates.find, request.update_id
        if (found := find(update_id)) is None:
            try:
                # What is unloaded has no version to go back to.
                reversible = request.adapters_after is None
                version = self._transaction.begin(
                    update_id, request.version, request.timeout, reversible=reversible,
                    joins=self._is_whole(request),
                )  # fmt: skip
            except VersionConflict:
                if (found := find(update_id)) is None:
                    raise
            else:
                if (found := find(update_id)) is None:
                    return version
                self._transaction.give_up("it is committed already", counts=False)
        self._replays = found
        return found.begun.version

    def _check(self, request: UpdateRequest) -> None:
        """Raise what is wrong with the request itself, whatever is live."""
        if request.transport not in (*self._transports, *served(self._transports)):
            raise ConfigError(
                f"transport {request.transport!r:.80} is for one engine: trainers meet each of its "
                "ranks, and a fleet's members come and go; use transport='auto' (here: "
                f"{' or '.join(served(self._transports))})"
            )
        shared = CardMemory.offered(request)
        if shared is not None:
            gpu = card_of(shared)
            if not any(gpu in link.reaches_on(shared.host) for link in self.fleet.links()):
                raise nobody_maps(gpu)
        if request.staging == "none":
            raise ConfigError("a fleet's members have to be prepared: staging='none' cannot be")
        if request.in_flight == "wait":
            raise ConfigError(
                "a fleet's members drain within their leases or not at all: in_flight='wait' is "
                "for one engine; use keep, recompute, abort or pin"
            )

    def _begin(self, request: UpdateRequest, version: int) -> Begun:
        fleet = self.fleet
        live = (fleet.epoch, fleet.version)  # while the update is under way
        if request.base is not None and tuple(request.base) != live:
            why = f"built on (epoch, version) {tuple(request.base)}, but {live} is live"
            self._transaction.give_up(why, counts=False)
            raise VersionConflict(why)
        self._request = replace(request, version=version)
        # Nobody depends on a member that joins, where there is another.
        links = sorted(self._transaction.links.values(), key=lambda link: link.joins)
        self._parts = {x.name: Part(x.name, x.client.open(), x.place, x.relays) for x in links}
        self._begin_all(self._request)
        return Begun(
            update_id=request.update_id, epoch=live[0], base_version=live[1], version=version,
            mappers=None if self._card is None else self._card.mappers,
        )  # fmt: skip

    def buffer(self, nbytes: int) -> Tensor | None:
        return None

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        if self._replays is None:
            with self._lock:
                self._bucket(header, payload)

    def _bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        while header.index - self._waiting >= AHEAD and self._request is not None:
            self.wait(self._waiting, self._request.timeout)

        if payload is None:
            payload = self._memory.get(header, self._live().timeout)
        else:
            self._memory.put(header, payload)
        self._left[header.index] = header, payload

        self._each(  # none of them waits
            lambda part: None if part.maps in self._parts else self._announce(part, header.index),
            at_once=False,
        )

    def wait(self, index: int, timeout: float) -> None:
        if self._replays is None:
            with self._lock:
                self._wait(index, timeout)

    def _wait(self, index: int, timeout: float) -> None:
        # Where it will lie in another member's memory, that one has to have it first.
        second = {part.name for part in self._parts.values() if part.maps in self._parts}
        silent: list[tuple[str, str]] = []  # who fed in vain, and whom

        def take(part: Part) -> None:
            self._announce(part, index)
            began = time.monotonic()
            first, lost = self._took(part, index, timeout)
            if lost:
                if time.monotonic() - began > SILENT:
                    silent.append((part.feeder, part.name))
                part.is_lost(first, lost)
                self._announce(part, index)
                part.channel.wait(index, timeout)

        self._each(take, only=self._parts.keys() - second)
        if second:
            self._each(take, only=second)
        for feeder, fed in silent:
            if feeder in self._parts:  # it has the bucket: the way between them lost it
                self._does_not_reach(feeder, fed)
        if self._left.pop(index, None) is not None:
            self._waiting = index + 1

    def seal(self, seal: Seal) -> None:
        if seal.fence is not None:
            raise VersionConflict("a fleet decides by itself: an update of one cannot be prepared")
        if self._replays is not None:
            self._replays.check_same(seal)
            return
        fleet, request = self.fleet, self._live()
        for index in sorted(self._left):
            self.wait(index, request.timeout)
        adapters = self._adapters_after(seal)
        digest = digest_of_all(self._models_after(seal), (one.digest for one in adapters))

        def vote(part: Part) -> None:
            label = seal.label if self._transaction.links[part.name].knows("late_labels") else None
            part.channel.seal(replace(seal, fence=fleet.promise.fence, label=label))
            fleet.voted(request.update_id, part.name, digest, adapters)

        self._seal = seal
        self._each(vote)

    def commit(self) -> UpdateReceipt:
        if self._replays is not None:
            return self._replays.receipt
        if self._receipt is None:
            request = self._live()
            if self._seal is None:
                raise VersionConflict("commit before seal")
            parts = self._parts.values()
            if request.in_flight in ("abort", "pin"):
                self.fleet.parted = request.version or 0
            self._receipt = self._transaction.commit(
                request.transport,
                front_sent_bytes={**self._sent, **{part.name: part.sent for part in parts}},
                members_map={part.name: part.maps for part in parts if part.maps},
                members_fed_by={part.name: part.fed_by for part in parts if not part.maps},
            )
        return self._receipt

    def abort(self, reason: str) -> None:
        self._aborted = True
        if self._asked is None and not self._closed:
            self._log.failed("", reason)
        if self._transaction.give_up(reason):
            for part in list(self._parts.values()):
                part.channel.abort(reason)

    def close(self) -> None:
        self._closed = True
        when = "before the update had begun"
        if self._begun is not None:
            when = "while its tensors came in" if self._seal is None else "before the commit"
        serves = f"version {self.fleet.version} serves on"
        self.abort(f"the trainer went away, or closed its channel, {when}: {serves}")
        for name in list(self._parts):
            self._let_go(name)
        self._left.clear()
        self._memory.close()

    # ---- helpers ----

    def _record(self, receipt: UpdateReceipt) -> None:
        assert self._begun is not None
        assert self._seal is not None
        sealed = total(self._seal.digests.values())
        self._updates.add(Committed(begun=self._begun, sealed=sealed, receipt=receipt))

    def _is_whole(self, request: UpdateRequest) -> bool:
        """Whether it brings all that a member holds."""
        components = {component_of(name) for name in self._names}
        adapters = self.fleet.promise.adapters or request.adapters
        builds_on = request.base is not None or request.encoding != "full" or request.partial
        return not adapters and not builds_on and components <= set(request.components)

    def _begin_all(self, request: UpdateRequest) -> None:
        """Each member's part, with the bytes, or an offer of memory that they will lie in, or
        another that will bring them.
        """
        here, parts = host_id(), self._parts.values()
        near = sum(1 for part in parts if here and part.host == here)
        if (shared := CardMemory.offered(request)) is not None:
            self._card = self._dealt(shared)
        cards = {} if self._card is None else self._card.offers
        if request.transport == "ipc" and shared is None:
            self._memory = HostMemory.of_trainer(request, read=near < len(parts))
        elif near > 1:
            self._memory = HostMemory.of_front(request)
        able = {part.name for part in parts if part.relays}
        planned = ways(
            {part.name: part.host for part in parts}, here, able,
            offered=bool(self._memory.offer), cards=cards.keys(),
        )  # fmt: skip
        chained = able if any(way.relays for way in planned.values()) else set()
        others = {name for name, way in planned.items() if way.maps not in ("", FRONT, CARD)}
        offers: dict[str, Mapping[str, Any]] = {}

        def begin_fed(part: Part) -> None:
            # A share is the stream's business, whose grace would outlive this front.
            shares, relays = planned[part.name].shares, part.name in chained
            offer = to_plain(StreamOffer(shares=shares, relays=relays)) if shares or relays else {}
            begun = self._begin_part(part, "inline", offer)
            part.feed, offers[part.name] = begun.feed, begun.shared

        def begin(part: Part) -> None:
            part.maps = planned[part.name].maps
            if part.maps:
                self._begin_part(part, "ipc", cards.get(part.name, self._memory.offer))
            else:
                begin_fed(part)

        def begin_other(part: Part) -> None:
            first = planned[part.name].maps
            offer = offers.get(first)
            if offer and first in self._parts:
                part.maps = first
                self._begin_part(part, "ipc", offer)
            else:
                begin_fed(part)

        self._each(begin, begins=True, only=self._parts.keys() - others)
        if others:
            self._each(begin_other, begins=True, only=others)
        if chained:
            self._chain(request)
        if others or chained or (near and self._memory.offer and request.transport != "ipc"):
            # Its name goes with the first bucket.
            self._each(
                lambda part: self._mapped(part, lambda: part.channel.wait(0, request.timeout))
            )

    def _dealt(self, shared: SharedAllocation) -> CardMemory:
        """Flags of the trainer's memory for each member that maps it."""
        links = {name: self._transaction.links[name] for name in self._parts}
        reaches = {name: link.reaches_on(shared.host) for name, link in links.items()}
        ranks = {name: len(link.devices) for name, link in links.items()}
        try:
            return CardMemory.of(shared, reaches, ranks)
        except ConfigError as error:
            self._transaction.give_up(str(error), counts=False)
            raise

    def _took(self, part: Part, index: int, timeout: float) -> tuple[int, str]:
        """As the channel's."""
        return self._mapped(part, lambda: part.channel.took(index, timeout))

    def _mapped(self, part: Part, wait: Callable[[], T]) -> T:
        """What ``wait`` returns; who cannot map a GPU's memory, or its host's, whatever it
        announces, is not asked to the next time.
        """
        try:
            return wait()
        except TransferFailed:
            link = self._transaction.links.get(part.name)
            if part.maps and not part.got and not self._aborted and link is not None:
                if part.maps == CARD:
                    link.maps_no_card()
                else:
                    link.maps_no_memory()
            raise

    def _chain(self, request: UpdateRequest) -> None:
        """Have each member that can be fed take what comes on to the next one."""
        before = followers(part.name for part in self._parts.values() if part.feed)
        next_of = {name: self._parts[after] for after, name in before.items()}

        def forward(part: Part) -> None:
            if (to := next_of.get(part.name)) is not None:
                unreached, began = self._transaction.links[part.name].unreached, time.monotonic()
                if began < unreached.get(to.name, 0.0):
                    to.fed_by = f"{FRONT}: {part.name} did not reach it lately"
                    return
                wanted = self._transaction.links[to.name].forwarding(request, to.feed)
                if problem := part.channel.forward(wanted):
                    to.fed_by = f"{FRONT}: {part.name} does not reach it: {problem}"[:300]
                    if time.monotonic() - began > SILENT:
                        self._does_not_reach(part.name, to.name)
                else:
                    to.feeder = to.fed_by = part.name

        self._each(forward)

    def _does_not_reach(self, feeder: str, fed: str) -> None:
        """What that costs is not paid again by the next updates."""
        self._transaction.links[feeder].unreached[fed] = time.monotonic() + TRY_AGAIN

    def _begin_joining(self, part: Part, request: UpdateRequest) -> Begun:
        """On a member that does not serve: it keeps the others waiting for a bounded time alone."""
        info = self._transaction.links[part.name].control.info()
        if why := self.fleet.unlike(info):
            raise ConfigError(why)
        begun: Future[Begun] = Future()
        limit = min(JOIN_WAIT, request.timeout)
        wanted = replace(request, adapters_after={} if info.adapters else None)

        def begin() -> None:
            resolve(begun, lambda: part.channel.begin(wanted))

        threading.Thread(target=begin, name="rollout-fleet-join", daemon=True).start()
        try:
            return begun.result(limit)
        except FutureTimeout:
            part.channel.close()
            raise DeadlineExceeded(f"it was not free for the update within {limit:g} s") from None

    def _begin_part(self, part: Part, transport: str, offer: Mapping[str, Any]) -> Begun:
        """The trainer's own stream ends here: one of ours brings each member its part."""
        request = self._live()
        if (base := request.base) is not None:
            info = self._transaction.links[part.name].client.info()
            base = info.epoch, info.version
        request = replace(request, base=base, transport=transport, offer=offer)
        if self._transaction.links[part.name].joins:
            return self._begin_joining(part, request)
        try:
            return part.channel.begin(request)
        except VersionConflict as error:
            raise self._past_the_front(part, error) from error

    def _past_the_front(self, part: Part, error: VersionConflict) -> VersionConflict:
        """``error`` of a member, explained where its weights are not those of this fleet."""
        has, fleet = self._transaction.links[part.name].client.info().version, self.fleet
        if has == fleet.version:
            return error
        return VersionConflict(
            f"it has version {has}, which this front has not committed: somebody has updated it at "
            f"its own address. It leaves service, and version {fleet.version} serves on; restart "
            "it, and update the fleet's address alone"
        )

    def _announce(self, part: Part, last: int) -> None:
        """The buckets up to ``last`` that it has not been told of: by themselves where it finds the
        bytes in memory that it maps, or is fed until it says otherwise; with them where nobody else
        brings them.
        """
        maps = part.maps in (FRONT, CARD) or part.maps in self._parts
        brings = not part.feeder and not maps
        for index in sorted(self._left):
            if part.got <= index <= last:
                header, payload = self._left[index]
                if brings and payload is None:
                    raise TransferFailed(f"bucket {index} came without its bytes")
                part.announce(header, payload if brings else None)

    def _live(self) -> UpdateRequest:
        if self._request is None:
            raise VersionConflict("no update has begun")
        self._transaction.check()
        return self._request

    def _each(
        self,
        fn: Callable[[Part], None],
        *,
        at_once: bool = True,
        begins: bool = False,
        only: Collection[str] | None = None,
    ) -> None:
        """``fn`` of every member that is left (of ``only``); those that fail drop out."""
        self._live()
        parts = dict(self._parts)
        self._transaction.each(
            lambda link: fn(parts[link.name]), at_once=at_once, begins=begins, only=only
        )

    def _let_go(self, name: str) -> None:
        if (part := self._parts.pop(name, None)) is not None:
            self._sent[name] = part.sent
            self.fleet.later(part.channel.close)  # which waits for a member that hangs

    def _adapters_after(self, seal: Seal) -> Adapters:
        """All that members will hold."""
        request = self._live()
        stay = request.adapters_after
        live = self.fleet.promise.adapters
        after = {one.name: one for one in live if stay is None or one.name in stay}
        for name, spec in request.adapters.items():
            part, version = adapter_component(name), request.adapter_version(name)
            tensors = total(v for n, v in seal.digests.items() if component_of(n) == part)
            digest = adapter_digest(name, version, spec, tensors)
            after[name] = HeldAdapter(name, version, digest)
        return tuple(after[name] for name in sorted(after))

    def _models_after(self, seal: Seal) -> int:
        """The digest of all models' tensors that members will hold."""
        request = self._live()
        if not request.models:
            live = self.fleet.promise
            return (live.digest - total(a.digest for a in live.adapters)) & MASK
        sent = {name: value for name, value in seal.digests.items() if name in self._names}
        if len(sent) < len(self._names):  # it is partial, or of one component
            link = next(iter(self._transaction.links.values()))
            sent = {**link.client.digests(request.timeout), **sent}
        return total(sent.values())
