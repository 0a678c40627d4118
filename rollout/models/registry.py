"""Which class builds which architecture; classes are imported only when one is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from rollout.errors import ConfigError

BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        "LlamaForCausalLM": "rollout.models.llama:LlamaForCausalLM",
        "MixtralForCausalLM": "rollout.models.mixtral:MixtralForCausalLM",
        "Qwen2ForCausalLM": "rollout.models.qwen2:Qwen2ForCausalLM",
        "Qwen2MoeForCausalLM": "rollout.models.qwen2_moe:Qwen2MoeForCausalLM",
        "Qwen3ForCausalLM": "rollout.models.qwen3:Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM": "rollout.models.qwen3_moe:Qwen3MoeForCausalLM",
    }
)
TYPO = 0.9  # how alike a name must be to be one misspelt, rather than another model's
ENTRY_POINT_GROUP = "rollout.models"


@dataclass(frozen=True, slots=True)
class Registry:
    """An immutable table architecture -> ``module:Class``.

    There is no process-wide registry to mutate: ``register_model`` returns a wider table, which is
    passed along. A package that must also be seen by rank processes declares an entry point in
    the group ``rollout.models`` (name: the architecture; value: ``module:Class``). The class is a
    ``CausalLM``, or any module that loads by vLLM's contract (``foreign.py``).
    """

    entries: Mapping[str, str] = field(default_factory=lambda: BUILT_IN)

    def register_model(self, architecture: str, path: str) -> Registry:
        """A registry that also knows ``architecture``, built by the class at ``module:Class``."""
        module, _, name = path.partition(":")
        if not module or not name:
            raise ConfigError(f"model path must read 'package.module:Class', got {path!r}")
        return Registry(MappingProxyType({**self.entries, architecture: path}))

    def choose(self, architectures: Iterable[str]) -> str:
        """The first supported name; ``ConfigError`` lists the supported ones and the nearest."""
        names = list(architectures)
        for known in (self.entries, installed_models()):
            for name in names:
                if name in known:
                    return name
        supported = sorted({*self.entries, *installed_models()})
        near = [
            hit for name in names for hit in difflib.get_close_matches(name, supported, 1, TYPO)
        ]
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(
            f"architectures {names} are not supported.{hint} Supported: {', '.join(supported)}"
        )

    def load(self, architecture: str) -> Any:
        """Import and return the class of an architecture that ``choose`` named."""
        path = self.entries.get(architecture) or installed_models().get(architecture)
        if path is None:
            self.choose([architecture])
        module, _, name = str(path).partition(":")
        try:
            return getattr(import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{architecture}: cannot import {path}: {error}") from error


def installed_models() -> dict[str, str]:
    """Architectures that installed packages announce by entry point."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
