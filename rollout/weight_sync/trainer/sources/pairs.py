"""A name and its tensor, or what was given in their place and what to send instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from rollout.errors import SourceFailed, some


def pair_of(item: Any, where: str = "") -> tuple[str, Tensor]:
    """``item``, a name and a tensor, else ``SourceFailed``, whose text begins with ``where``."""
    if isinstance(item, tuple | list) and len(item) == 2:
        name, tensor = item
        if isinstance(name, str) and isinstance(tensor, Tensor):
            return name, tensor
    raise SourceFailed(f"{where}expected (name, tensor), got {_instead(item)}")


def _instead(item: Any) -> str:
    if isinstance(item, Tensor):
        return f"a {type(item).__name__} without its name: pass the module, or named_parameters()"
    if isinstance(item, nn.Module):
        return f"a {type(item).__name__}: pass the module itself, in no list"
    if not isinstance(item, tuple | list):
        return f"{_shown(item)}; leave out what is no tensor"
    return f"({some([_shown(part) for part in item], 4)}); {_remedy(item)}"


def _remedy(parts: tuple[Any, ...] | list[Any]) -> str:
    if len(parts) != 2:
        return "give the name and the tensor, and nothing else"
    first, second = parts
    if isinstance(first, Tensor):
        return "the name comes first"
    if isinstance(second, Tensor):
        return "a name is a text"
    if isinstance(second, Mapping | nn.Module):
        return f"if {first!r:.80} is the model's, pass that by itself"
    if _kind(second) == "numpy.ndarray":
        return "make a tensor of it by torch.from_numpy"
    return "leave out what is no tensor"


def _shown(part: Any) -> str:
    """A text as it is, for it may be the name; of anything else its type, never its values."""
    return f"{' '.join(repr(part).split()):.80}" if isinstance(part, str) else _kind(part)


def _kind(value: Any) -> str:
    kind = type(value)
    plain = isinstance(value, Tensor) or kind.__module__ == "builtins"
    return kind.__name__ if plain else f"{kind.__module__}.{kind.__qualname__}"
