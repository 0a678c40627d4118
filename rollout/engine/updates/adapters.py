"""Adapters in the transaction: the slots that they are staged in, and what a rollback brings back.

reserve --> staged by the ranks, voted on --> commit: the name means that slot from now on
                  |                              the version before it is kept for a rollback
                  +-- anything fails --> release: the slot is free again
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from rollout.engine.core import EngineCore
from rollout.engine.deadline_future import DeadlineFuture
from rollout.errors import ConfigError, EngineOverloaded, VersionConflict, some
from rollout.weight_sync.protocol.adapters import adapter_digest
from rollout.weight_sync.protocol.messages import UpdateRequest
from rollout.weight_sync.protocol.receipts import AdapterReceipt
from rollout.weights.adapters import AdapterSpec, AdapterVersion

_LOOK = 0.005  # seconds between looks for a slot that a sequence has left


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAdapter:
    """What is known of one version; ``digest``: ``protocol.adapters.adapter_digest``."""

    receipt: AdapterReceipt
    spec: AdapterSpec
    digest: int

    @classmethod
    def of(cls, name: str, receipt: AdapterReceipt, spec: AdapterSpec) -> KeptAdapter:
        digest = adapter_digest(name, receipt.version, spec, receipt.digest)
        return cls(receipt=receipt, spec=spec, digest=digest)


class AdapterUpdates:
    """For the holder of the lease; ``commit`` and ``go_back`` run inside a boundary.

    A version that was replaced is kept for a rollback until the next commit, or until its slot is
    needed; one that a sequence holds stays until that has ended.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        self._kept: dict[str, KeptAdapter] = {}  # by name@version

    @property
    def before(self) -> dict[str, AdapterVersion | None] | None:
        """See ``AdapterTable.before``."""
        return self._engine.adapters.before

    @property
    def newest(self) -> dict[str, AdapterVersion]:
        table = self._engine.adapters
        found = {name: table.newest(name) for name in table.names}
        return {name: version for name, version in found.items() if version is not None}

    @property
    def digests(self) -> dict[str, int]:
        """Of the newest version of each name."""
        kept = self._kept  # commits add to it, and what replaces it comes after them
        found = {name: kept.get(str(version)) for name, version in self.newest.items()}
        return {name: one.digest for name, one in found.items() if one is not None}

    @property
    def digests_before(self) -> dict[str, int]:
        """As ``digests`` after a rollback."""
        found: dict[str, AdapterVersion | None] = {**self.newest, **dict(self.before or {})}
        return {name: self.kept(one).digest for name, one in found.items() if one is not None}

    @property
    def known(self) -> dict[str, int]:
        """The digests of all versions that are kept, by name@version."""
        return {name: one.digest for name, one in self._kept.items()}

    def kept(self, version: AdapterVersion) -> KeptAdapter:
        """Of one that is the newest, or that a rollback would bring back."""
        return self._kept[str(version)]

    def prune(self) -> None:
        """Forget what is known of versions that are gone."""
        live = {*map(str, self.newest.values()), *map(str, dict(self.before or {}).values())}
        self._kept = {name: kept for name, kept in self._kept.items() if name in live}

    def check(self, request: UpdateRequest) -> None:
        """``VersionConflict`` where what is to be there afterwards is neither held nor sent."""
        newest = self.newest
        for name, version in (request.adapters_after or {}).items():
            held = newest.get(name)
            if name not in request.adapters and (held is None or held.version != version):
                raise VersionConflict(f"adapter {name}@{version} is not sent, and {held} is here")

    def after(self, request: UpdateRequest) -> tuple[str, ...]:
        """The names that will be served once this update is live."""
        after = request.adapters_after
        return tuple({**self.newest, **request.adapters} if after is None else after)

    def reserve(
        self,
        names: Sequence[str],
        timeout: float,
        since: float,
        check: Callable[[], None],
        after: Mapping[str, int] | None = None,
    ) -> dict[str, int]:
        """A free slot for each name; waits for sequences to leave theirs, for ``timeout`` seconds
        from ``since``, a monotonic time. ``check`` raises where nobody waits for it any more.

        ``after``: ``UpdateRequest.adapters_after``. An engine that may not serve, as it catches up
        with its fleet, gives up what it will not need where slots are short.
        Raises ``ConfigError`` where waiting cannot help, ``EngineOverloaded`` at the deadline, and
        ``DeadlineExceeded`` where the engine's thread came to no boundary.
        """
        until = since + timeout
        what = f"taking slots for the adapters {some(names)} (phase: begin)"
        while True:
            taken = self._engine.at_step_boundary(lambda: self._take(names, after))
            give_back = partial(taken.add_done_callback, self._nobody_waits)
            left = max(_LOOK, until - time.monotonic())
            slots = DeadlineFuture(taken, what, left, give_back).result()
            if slots is not None:
                return slots
            check()
            if time.monotonic() > until:
                raise EngineOverloaded(
                    f"no slot became free within {timeout:g} s for {some(names)}: requests "
                    "that run hold older versions of adapters; wait for them or abort them, or "
                    f"start the engine with more {self._engine.adapters.setting}"
                )
            time.sleep(_LOOK)

    def release(self, slots: Mapping[str, int]) -> None:
        """Of an update that has failed; waits for nobody."""
        if slots:
            self._engine.at_step_boundary(lambda: self._give_back(slots))

    def commit(
        self,
        slots: Mapping[str, int],
        made: Mapping[str, KeptAdapter],
        after: Mapping[str, int] | None,
    ) -> None:
        """Names mean what was ``made`` in these slots; ``after``: and there are no others."""
        table = self._engine.adapters
        before = {name: table.newest(name) for name in slots}
        for name, slot in slots.items():
            version = made[name].receipt.version
            self._kept[f"{name}@{version}"] = made[name]
            table.commit(name, slot, version, again=after is not None)
        gone = [] if after is None else [name for name in table.names if name not in after]
        for name in gone:
            table.remove(name)
        table.before = None if gone or (table.before is None and after is not None) else before

    def go_back(self) -> None:
        """Names mean again what they meant before the last commit."""
        for name, before in (self.before or {}).items():
            self._engine.adapters.restore(name, before)
        self._engine.adapters.before = None

    def _take(self, names: Sequence[str], after: Mapping[str, int] | None) -> dict[str, int] | None:
        """Slots for all of them, or None; at the cost of a rollback where there are no others."""
        table = self._engine.adapters
        short = len(table.names) + len(names) > table.slots
        if after is not None and short and self._engine.serving.is_over:
            for name in [n for n in table.names if n in names or n not in after]:
                table.remove(name)
            table.before = None
        live = len(table.names)
        if live + len(names) > table.slots:
            raise ConfigError(
                f"no slot can become free for {some(names)}: {live} of {table.slots} hold "
                "the newest versions of adapters, which serve until the commit; unload some, or "
                f"start the engine with {table.setting}={live + len(names)} or more"
            )
        slots: dict[str, int] = {}
        while len(slots) < len(names):
            try:
                slots[names[len(slots)]] = table.reserve()
            except ConfigError:
                if not table.kept:
                    self._give_back(slots)
                    return None
                table.before = None
        places = self._engine.places
        if places is not None:
            places.forget(slots.values())
        return slots

    def _nobody_waits(self, taken: Future[dict[str, int] | None]) -> None:
        """Slots that were taken after the update had given up are free again."""
        if not taken.cancelled() and taken.exception() is None:
            self.release(taken.result() or {})

    def _give_back(self, slots: Mapping[str, int]) -> None:
        for slot in slots.values():
            self._engine.adapters.release(slot)
