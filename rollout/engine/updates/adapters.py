"""Adapters in the transaction: the slots that they are staged in, and what a rollback brings back.

reserve --> staged by the ranks, voted on --> commit: the name means that slot from now on
                  |                              the version before it is kept for a rollback
                  +-- anything fails --> release: the slot is free again
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from rollout.engine.ask import Asked
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

    @property
    def before(self) -> dict[str, AdapterVersion | None] | None:
        """See ``AdapterTable.before``."""
        return self._engine.adapters.before

    @property
    def newest(self) -> dict[str, AdapterVersion]:
        table = self._engine.adapters
        found = {name: table.newest(name) for name in table.names}
        return {name: version for name, version in found.items() if version is not None}

    def reserve(self, names: Sequence[str], timeout: float) -> dict[str, int]:
        """A free slot for each name; waits for sequences to leave theirs, at most ``timeout``.

        Raises ``ConfigError`` where waiting cannot help, ``EngineOverloaded`` at the deadline, and
        ``DeadlineExceeded`` where the engine's thread came to no boundary.
        """
        deadline = time.monotonic() + timeout
        what = f"taking slots for the adapters {', '.join(names)} (phase: begin)"
        while True:
            taken = self._engine.at_step_boundary(lambda: self._take(names))
            give_back = partial(taken.add_done_callback, self._nobody_waits)
            slots = Asked(taken, what, timeout, give_back).result()
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
        table.before = before

    def go_back(self) -> None:
        """Names mean again what they meant before the last commit."""
        for name, before in (self.before or {}).items():
            self._engine.adapters.restore(name, before)
        self._engine.adapters.before = None

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
                table.before = None
        return slots

    def _nobody_waits(self, taken: Future[dict[str, int] | None]) -> None:
        """Slots that were taken after the update had given up are free again."""
        if not taken.cancelled() and taken.exception() is None:
            self.release(taken.result() or {})

    def _give_back(self, slots: Mapping[str, int]) -> None:
        for slot in slots.values():
            self._engine.adapters.release(slot)
