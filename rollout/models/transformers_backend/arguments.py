"""What transformers' modules call what a pass gives them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn


def position_arguments(model: nn.Module, positions: Tensor) -> dict[str, Tensor]:
    """What tells ``model`` the positions [sequences, T] of its tokens; where it takes none, its
    modules that embed them are told (``bind``).
    """
    takes = _takes(model, "position_ids")
    if not takes and _hands_on(type(model)):  # to a decoder within
        whole: Any = model
        inner = whole.get_decoder() if hasattr(model, "get_decoder") else model
        takes = _takes(inner, "position_ids")
    return {"position_ids": positions + first_position(model)} if takes else {}


def _takes(module: Any, argument: str) -> bool:
    kind: Any = type(module)
    return argument in _arguments(kind)


def _hands_on(kind: Any) -> bool:
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in _arguments(kind).values())


@cache  # asked in every step
def _arguments(kind: type[Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.forward).parameters


def cache_argument(model: nn.Module) -> str:
    """What ``model`` calls the cache that it is given."""
    return "cache_params" if _takes(model, "cache_params") else "past_key_values"


def first_position(model: nn.Module) -> int:
    """What a model's own count of positions begins with; past the padding's where it has one."""
    for module in model.modules():
        if hasattr(module, "create_position_ids_from_input_ids"):
            return int(getattr(module, "padding_idx", -1)) + 1
    return 0
