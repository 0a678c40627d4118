"""Load formats: what opens a checkpoint, under the name that ``load_format`` has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from rollout.errors import ConfigError
from rollout.weights import TensorMeta
from rollout.weights.files import Files

ENTRY_POINT_GROUP = "rollout.loaders"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRequest:
    """What a loader is asked for. ``location``: a directory, or a URL (``remote.py``).

    ``metadata``: the model's complete set, in file form and the engine's dtype, where it is known.
    ``seed``: of made-up values. ``device``: where what is read will lie.
    """

    location: str
    load_format: str = "auto"
    metadata: Sequence[TensorMeta] = ()
    seed: int = 0
    device: str = "cpu"

    @property
    def directory(self) -> Path:
        return Path(self.location)


Loader = Callable[[LoadRequest], Files]
_LOADERS: dict[str, Loader] = {}


def register_loader(name: str) -> Callable[[Loader], Loader]:
    """``load_format=name`` opens a checkpoint with the decorated function.

    It gets a ``LoadRequest`` and returns ``Files``: the names, dtypes and shapes of all tensors,
    and reads of boxes of them. Ranks in processes of their own import it by its module and name; a
    package can announce ``module:function`` by an entry point in the group ``rollout.loaders``,
    too. ``ConfigError`` where the name is taken.
    """

    def register(loader: Loader) -> Loader:
        held = _LOADERS.setdefault(name, loader)
        if _path(held) != _path(loader):
            raise ConfigError(f"load format {name!r} is {_path(held)}'s; choose another name")
        return loader

    return register


def known_formats() -> list[str]:
    """Every name that ``load_format`` may have."""
    return sorted({*_LOADERS, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))})


def find_loader(name: str) -> Loader:
    """By its name, or ``module:function``; ``ConfigError`` where there is none."""
    if name in _LOADERS:
        return _LOADERS[name]
    announced = {p.name: p.value for p in entry_points(group=ENTRY_POINT_GROUP)}
    path = announced.get(name, name)
    module, mark, function = path.partition(":")
    if not mark:
        raise ConfigError(
            f"Load format `{name}` is not supported; use one of {', '.join(known_formats())}"
        )
    try:
        found: Any = getattr(import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"load format {name}: cannot import {path}: {error}") from error
    return found  # type: ignore[no-any-return]


def portable(name: str) -> str:
    """``name`` as another process of the same installation knows it."""
    loader = find_loader(name)
    if loader.__module__.startswith("rollout."):
        return name
    if loader.__module__ == "__main__":
        raise ConfigError(
            f"load format {name!r} is registered in the program itself, which ranks in processes "
            "of their own cannot import: put the loader into a module"
        )
    return _path(loader)


def _path(loader: Loader) -> str:
    return f"{loader.__module__}:{getattr(loader, '__qualname__', repr(loader))}"
