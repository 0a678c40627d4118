"""A user's own classes: of whole models, and of modules within transformers' models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from types import ModuleType
from typing import Any

from torch import nn

from rollout.errors import ConfigError
from rollout.models.arch import Arch
from rollout.models.registry import Registry
from rollout.models.user_module import imported

NAME = "MODULE_MAP"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleMap:
    """``models``: architecture -> ``module:Name`` of a class or ``Arch``, before those that are
    declared here; ``modules``: ``package.module.Class`` of transformers -> ``module:Class`` in its
    place.
    """

    models: Mapping[str, str] = field(default_factory=dict)
    modules: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, where: str) -> ModuleMap:
        """``MODULE_MAP`` of a Python file, or of a module that can be imported.

        Its values are classes, or ``module:Class``. Raises ``ConfigError``.
        """
        module = imported(where, "module_map")
        found = getattr(module, NAME, None)
        if not isinstance(found, Mapping):
            raise ConfigError(f"{where} has no dict {NAME}: architecture or class -> class")
        rows = {str(name): _path(module, str(name), value) for name, value in found.items()}
        return cls(
            models={name: path for name, path in rows.items() if "." not in name},
            modules={name: path for name, path in rows.items() if "." in name},
        )

    def registry(self) -> Registry:
        """What is declared here, and these models."""
        registry = Registry()
        for architecture, path in self.models.items():
            registry = registry.register_model(architecture, path)
        return registry


def replace_modules(model: nn.Module, modules: Mapping[str, str]) -> None:
    """Make every module of a class in ``modules`` one of the class that it names, in place.

    That is a subclass: it keeps parameters and children, and brings another ``forward``.
    """
    found = False
    for module in list(model.modules()):
        kind = type(module)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in modules:
            continue
        path, _, own = modules[name].partition(":")
        other = getattr(import_module(path), own, None)
        if not (isinstance(other, type) and issubclass(other, kind)):
            raise ConfigError(f"{NAME}: {modules[name]} has to be a subclass of {name}")
        module.__class__ = other
        found = True
    if modules and not found:
        raise ConfigError(
            f"{NAME}: the model has no module of class {' or '.join(sorted(modules))}; classes of "
            "transformers' models are replaced, by their full names"
        )


def _path(module: ModuleType, name: str, value: Any) -> str:
    """``module:Name`` of what stands under ``name`` in the map of ``module``."""
    if isinstance(value, type):
        return f"{value.__module__}:{value.__qualname__}"
    if isinstance(value, str) and ":" in value:
        return value
    if isinstance(value, Arch) and "." not in name:
        own = next((n for n, each in vars(module).items() if each is value), name)
        setattr(module, own, value)  # where it was made within the map
        return f"{module.__name__}:{own}"
    raise ConfigError(
        f"{module.__file__}: {NAME}[{name!r}] must be a class, an Arch or 'module:Name'"
    )
