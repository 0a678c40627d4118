"""Documents that travel again and again, with large fields that are mostly what they were.

What a trainer and an engine tell each other of hundreds of tensors is the same in every update:
its text is written once, and parsed and checked once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import msgspec

from rollout.errors import TransferFailed
from rollout.wire.codec import from_plain, parsed, to_json, to_plain

T = TypeVar("T")
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def field_texts(data: bytes, what: str) -> dict[str, bytes]:
    """The JSON text of each field of a document; ``TransferFailed`` where it is none."""
    try:
        return {name: bytes(raw) for name, raw in _fields.decode(data).items()}
    except (ValueError, RecursionError) as error:
        raise TransferFailed(f"malformed {what}: {error}") from error


def from_texts(kind: type[T], texts: Mapping[str, bytes], known: Mapping[str, Any]) -> T:
    """As ``from_json``; ``known``: lists that need not be read again."""
    plain = {name: [] if name in known else parsed(text) for name, text in texts.items()}
    noun: Any = from_plain(kind, plain)
    found: T = replace(noun, **known) if known else noun
    return found


class RepeatedWriter:
    """``to_json`` of nouns whose fields ``names`` are mostly equal to the last one's.

    Threads may share it.
    """

    def __init__(self, *names: str) -> None:
        self._names = names
        self._last: dict[str, tuple[Any, msgspec.Raw]] = {}

    def to_json(self, noun: Any) -> bytes:
        plain = to_plain(replace(noun, **dict.fromkeys(self._names)))
        plain |= {name: self._text(name, getattr(noun, name)) for name in self._names}
        return to_json(plain)

    def _text(self, name: str, value: Any) -> msgspec.Raw:
        last = self._last.get(name)
        if last is None or last[0] != value:
            last = self._last[name] = value, msgspec.Raw(to_json(value))
        return last[1]


class RepeatedReader(Generic[T]):
    """``from_json`` of nouns of ``kind`` whose fields ``names``, lists, mostly have the text that
    they had in the last one: they are then the same objects.

    Threads may share it.
    """

    def __init__(self, kind: type[T], *names: str) -> None:
        self._kind, self._names = kind, names
        self._last: dict[str, tuple[bytes, Any]] = {}

    def from_json(self, data: bytes) -> T:
        texts, last = field_texts(data, self._kind.__name__), self._last
        known = {name: value for name, (text, value) in last.items() if texts.get(name) == text}
        noun = from_texts(self._kind, texts, known)
        self._last = {
            name: (texts[name], getattr(noun, name)) for name in self._names if name in texts
        }
        return noun
