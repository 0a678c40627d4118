"""Adapters in the transaction: the slots that they are staged in, and what a rollback brings back.

reserve --> staged by the ranks, voted on --> commit: the name means that slot from now on
                  |                              the version before it is kept for a rollback
                  +-- anything fails --> release: the slot is free again
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from rollout.engine.core import EngineCore
from rollout.errors import ConfigError, EngineOverloaded
from rollout.weights.adapters import AdapterVersion

_LOOK = 0.005  # seconds between looks for a slot that a sequence has left


class AdapterUpdates:
    """For the holder of the lease; ``commit`` and ``go_back`` run inside a boundary.

    A version that was replaced is kept for a rollback until the next commit, or until its slot is
    needed; one that a sequence holds stays until that has ended.
    """

    def __init__(self, engine: EngineCore) -> None:
        self._engine = engine
        # What the names of the last commit meant before it (None: nothing); None if that is gone.
        self.before: dict[str, AdapterVersion | None] | None = {}

    @property
    def newest(self) -> dict[str, AdapterVersion]:
        table = self._engine.adapters
        found = {name: table.newest(name) for name in table.names}
        return {name: version for name, version in found.items() if version is not None}

    def reserve(self, names: Sequence[str], timeout: float) -> dict[str, int]:
        """A free slot for each name; waits for sequences to leave theirs, at most ``timeout``.

        Raises ``ConfigError`` where waiting cannot help, ``EngineOverloaded`` at the deadline.
        """
        deadline = time.monotonic() + timeout
        while True:
            slots = self._engine.at_step_boundary(lambda: self._take(names)).result(timeout)
            if slots is not None:
                return slots
            if time.monotonic() > deadline:
                raise EngineOverloaded(
                    f"no slot became free within {timeout:g} s for {', '.join(names)}: requests "
                    "that run hold older versions of adapters; wait for them or abort them, or "
                    "start the engine with more max_adapters"
                )
            time.sleep(_LOOK)

    def release(self, slots: Mapping[str, int]) -> None:
        """Of an update that has failed; waits for nobody."""
        if slots:
            self._engine.at_step_boundary(lambda: self._give_back(slots))

    def commit(self, slots: Mapping[str, int], version: int) -> None:
        table = self._engine.adapters
        before = {name: table.newest(name) for name in slots}
        for name, slot in slots.items():
            table.commit(name, slot, version)
        self._keep(before)

    def go_back(self) -> None:
        """Names mean again what they meant before the last commit."""
        for name, before in (self.before or {}).items():
            self._engine.adapters.restore(name, before)
        self._keep(None)

    def _keep(self, before: dict[str, AdapterVersion | None] | None) -> None:
        self.before = before
        kept = (version.slot for version in (before or {}).values() if version is not None)
        self._engine.adapters.kept = set(kept)

    def _take(self, names: Sequence[str]) -> dict[str, int] | None:
        """Slots for all of them, or None; at the cost of a rollback where there are no others."""
        table = self._engine.adapters
        live = len(table.names)
        if live + len(names) > table.slots:
            raise ConfigError(
                f"no slot can become free for {', '.join(names)}: {live} of {table.slots} hold "
                "the newest versions of adapters, which serve until the commit; unload some, or "
                f"start the engine with max_adapters={live + len(names)} or more"
            )
        slots: dict[str, int] = {}
        while len(slots) < len(names):
            try:
                slots[names[len(slots)]] = table.reserve()
            except ConfigError:
                if not table.kept:
                    self._give_back(slots)
                    return None
                self._keep(None)
        return slots

    def _give_back(self, slots: Mapping[str, int]) -> None:
        for slot in slots.values():
            self._engine.adapters.release(slot)
