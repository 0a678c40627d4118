"""What ``structured_outputs`` of a request may be."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

MAX_CHARS = 1 << 16  # of a grammar, as JSON
MAX_DEPTH = 64


def grammar(value: Any) -> dict[str, Any] | None:
    """One kind of grammar as plain JSON; a schema or tag may come as its text."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"map one of {', '.join(GRAMMARS)} to a grammar")
    given = {key: one for key, one in value.items() if one is not None}
    spaces = given.pop("disable_any_whitespace", False)
    if len(given) != 1 or next(iter(given)) not in GRAMMARS or not isinstance(spaces, bool):
        raise ValueError(f"have one of {', '.join(GRAMMARS)}")
    [(kind, found)] = given.items()
    if kind in ("json", "structural_tag") and isinstance(found, str):
        found = _parsed(found)
    if not GRAMMARS[kind](found):
        raise ValueError(f"have another value for {kind!r}: see docs/openai.md")
    if len(_text(found)) > MAX_CHARS or _deeper(found, MAX_DEPTH):
        raise ValueError(f"be at most {MAX_CHARS} characters, nested at most {MAX_DEPTH} deep")
    return {kind: found, **({"disable_any_whitespace": True} if spaces else {})}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"be JSON: {error}") from None


def _text(found: Any) -> str:
    try:
        return json.dumps(found)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"be plain JSON: {error}") from None


def _deeper(value: Any, depth: int) -> bool:
    inside = value.values() if isinstance(value, Mapping) else value
    if not isinstance(value, Mapping | list | tuple):
        return False
    return depth == 0 or any(_deeper(one, depth - 1) for one in inside)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


# What ``structured_outputs`` may be, and whether a value is one.
GRAMMARS: Mapping[str, Callable[[Any], bool]] = {
    "json": lambda value: isinstance(value, Mapping),
    "regex": _is_text,
    "choice": lambda value: (
        isinstance(value, list | tuple) and bool(value) and all(map(_is_text, value))
    ),
    "grammar": _is_text,
    "json_object": lambda value: value is True,
    "structural_tag": lambda value: isinstance(value, Mapping),
}
