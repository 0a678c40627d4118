"""Which architectures there are: those declared in ``architectures/``, and those from elsewhere."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from rollout.errors import ConfigError, some
from rollout.models import architectures as declared
from rollout.models.arch import Arch
from rollout.wire.spellings import near

TYPO = 0.9  # how alike a name must be to be one misspelt, rather than another model's
ENTRY_POINT_GROUP = "rollout.models"
DECODER, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"


@functools.cache
def built_in() -> Mapping[str, str]:
    """Every ``Arch`` that a file of ``architectures/`` declares, under its name."""
    found = {}
    for file in pkgutil.iter_modules(declared.__path__, f"{declared.__name__}."):
        for name, value in vars(import_module(file.name)).items():
            if isinstance(value, Arch) and not name.startswith("_"):
                found[name] = f"{file.name}:{name}"
    return MappingProxyType(found)


@dataclass(frozen=True, slots=True)
class Registry:
    """An immutable table architecture -> ``module:name`` of an ``Arch`` or of a model's class.

    There is no process-wide registry to mutate: ``register_model`` returns a wider table, which is
    passed along. A package that must also be seen by rank processes declares an entry point in
    the group ``rollout.models`` (name: the architecture; value: ``module:Class``). The class is a
    ``CausalLM``, or any module that loads by vLLM's contract (``foreign.py``); a decoder that the
    blocks here can build needs no class, only an ``Arch``.
    """

    entries: Mapping[str, str] = field(default_factory=built_in)

    def register_model(self, architecture: str, path: str) -> Registry:
        """A registry that also knows ``architecture``: the class or ``Arch`` at ``module:name``."""
        module, _, name = path.partition(":")
        if not module or not name:
            raise ConfigError(f"model path must read 'package.module:Class', got {path!r}")
        return Registry(MappingProxyType({**self.entries, architecture: path}))

    def knows(self, architectures: Iterable[str]) -> bool:
        """Whether one of them is declared here or by an installed package."""
        return self._first_known(architectures) is not None

    def choose(self, architectures: Iterable[str]) -> str:
        """The first supported name; ``ConfigError`` lists those that are most like it."""
        names = list(architectures)
        if (name := self._first_known(names)) is None:
            raise self.refusal(names)
        return name

    def decoder_of(self, architecture: str) -> str | None:
        """The declared decoder below the score head of ``...ForSequenceClassification``; None where
        that name is declared itself, or is none, or has no declared decoder of text alone.
        """
        stem = architecture.removesuffix(CLASSIFIER)
        if (
            stem == architecture
            or architecture in self.entries
            or architecture in installed_models()
        ):
            return None
        for name in (f"{stem}{DECODER}", f"{stem.removesuffix('Text')}{DECODER}"):
            if name in self.entries:
                found = self.load(name)
                plain = isinstance(found, Arch) and found.texts is None and found.vision is None
                return name if plain else None
        return None

    def _first_known(self, architectures: Iterable[str]) -> str | None:
        names = list(architectures)
        if found := [name for name in names if name in self.entries]:
            return found[0]
        installed = installed_models()  # asks every package on the disk
        if found := [name for name in names if name in installed]:
            return found[0]
        return next((name for name in names if self.decoder_of(name) is not None), None)

    def refusal(self, names: list[str], why: str = "") -> ConfigError:
        """The error of architectures that are not known; ``why`` comes first."""
        supported = sorted({*self.entries, *installed_models()})
        import transformers  # slow; what it has is another model's name, however like one of ours

        strange = [name for name in names if name not in dir(transformers)]
        meant = next(filter(None, (near(name, supported, TYPO) for name in strange)), None)
        hint = f" Did you mean {meant!r}?" if meant else ""
        first = names[0] if names else ""
        likest = sorted(supported, key=lambda one: -SequenceMatcher(None, one, first).ratio())
        return ConfigError(
            f"architectures {names} are not supported.{why}{hint} Supported: {some(likest)}, and "
            f"...{CLASSIFIER} over those of text alone; docs/models.md has all, and `rollout "
            "check` tells of any checkpoint."
        )

    def load(self, architecture: str) -> Any:
        """Import the ``Arch`` or class of an architecture that ``choose`` named."""
        path = self.entries.get(architecture) or installed_models().get(architecture)
        if path is None and (decoder := self.decoder_of(architecture)) is not None:
            return self.load(decoder)
        if path is None:
            self.choose([architecture])
        module, _, name = str(path).partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{architecture}: cannot import {path}: {error}") from error

    def arch(self, architecture: str) -> Arch:
        """The declaration of an architecture; a class has none, and is read like Llama's."""
        try:
            found = self.load(architecture)
        except ConfigError:  # raised again where the model is built
            return Arch()
        return found if isinstance(found, Arch) else Arch()


def installed_models() -> dict[str, str]:
    """Architectures that installed packages announce by entry point."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
