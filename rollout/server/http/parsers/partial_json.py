"""Reads JSON objects, and marks, that are still being written, from the text so far.

What is returned for a text is a beginning of what is returned for any longer one, so that a stream
can send the difference.
"""

from __future__ import annotations

import json
import re


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def value_end(text: str, start: int) -> int | None:
    """Where the value that begins at ``start`` ends; None while it may go on."""
    depth, at, quoted = 0, start, False
    while found := (_IN_STRING if quoted else _OUTSIDE).search(text, at):
        char, at = found[0], found.end()
        if char == "\\":
            at += 1
        elif char == '"':
            quoted = not quoted
            if not quoted and not depth:
                return at
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth <= 0:
                return at + depth  # below 0: it closes what the value lies in
        elif not depth:
            return at - 1
    return None


# Each chunk of a stream is read from its beginning: what decides nothing is leapt over.
_IN_STRING, _OUTSIDE = re.compile(r'[\\"]'), re.compile(r'["{}\[\],\s]')


def object_fields(text: str, start: int) -> tuple[dict[str, str], int | None]:
    """The fields of the object at ``start`` as they are written, and where it ends.

    The end is None while it is open, and the last field may be cut short then; where it is no JSON
    any more it ends, too.
    """
    fields: dict[str, str] = {}
    at = skip_space(text, start + 1)
    while at < len(text) and text[at] == '"':
        end = value_end(text, at)
        key = None if end is None else as_string(text[at:end])
        if key is None or end is None:
            return fields, end
        at = skip_space(text, end)
        if text[at : at + 1] != ":":
            break
        at = skip_space(text, at + 1)
        if at == len(text):
            return fields, None
        end = value_end(text, at)
        fields.setdefault(key, text[at:end])  # a second one of its name comes too late
        if end is None:
            return fields, None
        at = next_item(text, end)
    return fields, items_end(text, at, "}")


def next_item(text: str, end: int, between: tuple[str, ...] = (",",)) -> int:
    """Where more follows the item that has ended at ``end``, behind a comma if one is there."""
    at = skip_space(text, end)
    return skip_space(text, at + 1) if text.startswith(between, at) else at


def items_end(text: str, at: int, closing: str) -> int | None:
    """Where an object or a list ends of which no item begins at ``at``; None while it may go on."""
    if at == len(text):
        return None
    return at + 1 if text[at] == closing else at


def as_string(raw: str) -> str | None:
    """The string that ``raw`` is the JSON of; None if it is not, or not whole."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        return None
    return value if isinstance(value, str) else None


def before_mark(text: str, mark: str) -> str:
    """``text`` without an end that may turn out to begin ``mark``."""
    longest = min(len(mark) - 1, len(text))
    held = next((n for n in range(longest, 0, -1) if mark.startswith(text[-n:])), 0)
    return text[: len(text) - held]
