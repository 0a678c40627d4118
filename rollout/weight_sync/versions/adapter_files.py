"""LoRA adapters from PEFT directories that a server reads itself, served unmerged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rollout.errors import InvalidRequest
from rollout.generation.sampling_params import MAX_NAME
from rollout.loader.peft_adapter import ADAPTER_DIRECTORY
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.versions.directories import allowed, check_inside, looks


class AdapterFiles:
    """Each is loaded by an update of that adapter alone, of an engine or of a fleet.

    Thread-safe, one at a time. A failure changes nothing, and requests that have begun keep the
    version they began with.
    """

    def __init__(self, versions: Callable[[], Mapping[str, int]]) -> None:
        """``versions``: what is served now, by name."""
        self._versions = versions
        self._lock = threading.Lock()
        # What files looked like before they were read, and the version that was made of them.
        self._read: dict[str, tuple[Path, object, int]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._versions())

    def load(
        self,
        name: str,
        where: Path,
        link: WeightLink,
        *,
        base_names: Sequence[str | None],
        timeout: float,
        inplace: bool = False,
    ) -> int:
        """Have requests by this name get the adapter of that directory; its version. Blocks.

        The version that is there where the files look as they did when it was read, unless
        ``inplace``. ``base_names``: what the base is asked by. Raises ``ConfigError`` for what
        cannot be read or does not fit, and where no slot can become free; ``WeightMismatch`` for
        tensors of another base's shapes.
        """
        if name in base_names:
            raise InvalidRequest(f"{name!r:.300} is the base model's name: choose another")
        check_name(name)
        with self._lock:
            seen, there = looks(where), self._versions().get(name)
            known = there is not None and self._read.get(name) == (where, seen, there)
            if there is not None and known and not inplace:
                return there
            options = UpdateOptions(timeout=timeout)
            receipt = publish(None, adapters={name: where}, connect=lambda: link, options=options)
            version = receipt.adapters[name].version
            self._read[name] = where, seen, version
            return version

    def unload(self, name: str, forget: Callable[[], bool]) -> bool:
        """Forget the name, by ``forget``; whether it was there."""
        with self._lock:
            self._read.pop(name, None)
            return forget()


def adapter_directory(name: str, path: str, weight_dirs: Sequence[str]) -> Path:
    """Where an adapter may be read; ``InvalidRequest`` or ``ConfigError`` where it may not."""
    check_name(name)
    where = allowed(path, weight_dirs, f"give {ADAPTER_DIRECTORY}")
    check_inside(where, weight_dirs)
    return where


def check_name(name: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
        raise InvalidRequest(f"the name of an adapter must be a text of 1 to {MAX_NAME} characters")
