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
from rollout.errors import InvalidRequest
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.versions.follower import looks

T = TypeVar("T")


class ServedAdapters:
    """Loads PEFT directories into the ranks' slots, each by an update of that adapter alone.

    Thread-safe, one at a time. A failure changes nothing, and requests that have begun keep the
    version they began with.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._loading = threading.Lock()
        # What files looked like before they were read, and the version that was made of them.
        self._read: dict[str, tuple[Path, object, int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return self._table.names

    def load(self, name: str, where: Path, link: WeightLink, *, inplace: bool = False) -> int:
        """Have requests by this name get the adapter of that directory; its version. Blocks.

        The version that is there where the files look as they did when it was read, unless
        ``inplace``. Raises ``ConfigError`` for what cannot be read or does not fit, and where no
        slot can become free; ``WeightMismatch`` for tensors of another base's shapes.
        """
        core = self._core
        if name in (core.config.served_model_name, core.config.model):
            raise InvalidRequest(f"{name!r:.300} is the base model's name: choose another")
        check_name(name)
        with self._loading:
            seen, there = looks(where), self._table.newest(name)
            known = there is not None and self._read.get(name) == (where, seen, there.version)
            if there is not None and known and not inplace:
                return there.version
            options = UpdateOptions(timeout=core.config.timeout)
            receipt = publish(None, adapters={name: where}, connect=lambda: link, options=options)
            version = receipt.adapters[name].version
            self._read[name] = where, seen, version
            return version

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
