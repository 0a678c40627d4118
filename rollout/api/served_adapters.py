"""LoRA adapters that are served unmerged, beside the weights (``max_adapters`` above 0)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from rollout.api.adapters import check_name
from rollout.engine.adapter_table import AdapterTable
from rollout.engine.ask import Asked
from rollout.engine.core import EngineCore
from rollout.engine.executors import gather_replies
from rollout.errors import InvalidRequest
from rollout.weight_sync.protocol.digests import combine
from rollout.weight_sync.versions.follower import looks
from rollout.weights.adapters import AdapterVersion

T = TypeVar("T")


class ServedAdapters:
    """Loads PEFT directories into the ranks' slots; thread-safe, one at a time.

    What is being loaded lies in a slot that nothing uses yet, on every rank, and gets its name
    between two steps once all ranks have it: a failure changes nothing. Requests that have begun
    keep the version they began with.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._loading = threading.Lock()
        self._read: dict[str, tuple[Path, object]] = {}  # what files looked like before the read

    @property
    def names(self) -> tuple[str, ...]:
        return self._table.names

    def load(self, name: str, where: Path, *, inplace: bool = False) -> AdapterVersion:
        """What requests by this name get from now on: the adapter of that directory. Blocks.

        The version that is there where the files look as they did when it was read, unless
        ``inplace``. Raises ``ConfigError`` for what cannot be read or does not fit, and where no
        slot is free; ``WeightMismatch`` for tensors of another base's shapes.
        """
        core = self._core
        if name in (core.config.served_model_name, core.config.model):
            raise InvalidRequest(f"{name!r:.300} is the base model's name: choose another")
        check_name(name)
        with self._loading:
            seen, there = (where, looks(where)), self._table.newest(name)
            if there is not None and not inplace and self._read.get(name) == seen:
                return there
            slot = self._ask(lambda: self._table.reserve())
            try:
                args = {"path": str(where), "slot": slot}
                replies = gather_replies(
                    core.call("stage_adapter", args), "stage_adapter", core.config.timeout
                )
                combine([reply["digests"] for reply, _ in replies])
            except BaseException:
                self._ask(lambda: self._table.release(slot))
                raise
            made = self._ask(lambda: self._table.commit(name, slot))
            self._read[name] = seen
            return made

    def unload(self, name: str) -> bool:
        """Forget the name; whether it was there."""
        with self._loading:
            self._read.pop(name, None)
            return self._ask(lambda: self._table.remove(name)) is not None

    @property
    def _table(self) -> AdapterTable:
        return self._core.adapters

    def _ask(self, fn: Callable[[], T]) -> T:
        core = self._core
        return Asked(core.at_step_boundary(fn), "an adapter's step", core.config.timeout).result()
