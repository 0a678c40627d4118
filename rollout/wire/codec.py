"""One codec for the nouns that travel: dataclasses, and the plain JSON-able documents they become.

A noun declares its types, with the bounds below where they need any; both directions follow from
that. Reading believes nothing: a field too many or too few (``ADDED`` ones apart), of another type
or out of bounds is a ``TransferFailed`` that names it. What fields say together a noun checks in
``__post_init__``, by ``ValueError``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints, overload

import msgspec
import torch
from msgspec import Meta

from rollout.errors import TransferFailed
from rollout.wire.frames import dtype_from_name, dtype_name

T = TypeVar("T")

MAX_INT = (1 << 63) - 1
MAX_DIGEST = (1 << 64) - 1
MAX_LIST = 1 << 20
MAX_STRING = 1 << 16
MAX_DIMS = 16

# Of a field that a noun got within a version of the protocol, for ``dataclasses.field``: at its
# default it does not travel, so that peers that do not know it understand all that does not use it,
# and refuse the rest by name. For nouns that are documents themselves.
ADDED = {"added": True}
_Check = Callable[[Any, str], None]

# msgspec 0.22 crashes where two threads give it a type at once that it has not seen before.
_learning = threading.RLock()
_known: set[Any] = set()


def _wide(plain: Any, at: str) -> None:
    if isinstance(plain, int) and plain > MAX_DIGEST:
        raise ValueError(f"an integer of more than 64 bits - at {at}")


def _number(plain: Any, at: str) -> None:
    if plain != plain:
        raise ValueError(f"not a number - at {at}")


# What ``Meta`` cannot say is a check beside it.
Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_INT)]
Digest = Annotated[int, Meta(ge=0), _wide]
# A fencing epoch grows by one with each coordinator: none that is near the end of its range leaves
# an engine without a later one, and JSON's readers hold these exactly.
Fence = Annotated[int, Meta(ge=0, lt=1 << 53)]
Seconds = Annotated[float, Meta(ge=0, lt=1e12), _number]
Text = Annotated[str, Meta(max_length=MAX_STRING)]
Dims = Annotated[tuple[Count, ...], Meta(max_length=MAX_DIMS)]
Many = Annotated[tuple[T, ...], Meta(max_length=MAX_LIST)]
Table = Annotated[Mapping[Text, T], Meta(max_length=MAX_LIST)]


def to_plain(noun: Any) -> Any:
    """Of objects, lists, numbers and strings alone."""
    plain = msgspec.to_builtins(noun, enc_hook=_encoded)
    kind: Any = type(noun)
    for name, default in _added(kind).items():
        if getattr(noun, name) == default:
            del plain[name]
    return plain


def to_json(noun: Any) -> bytes:
    try:
        kind: Any = type(noun)
        if any(getattr(noun, name) == default for name, default in _added(kind).items()):
            return msgspec.json.encode(to_plain(noun))
        return msgspec.json.encode(noun, enc_hook=_encoded)
    except UnicodeEncodeError as error:
        raise TransferFailed(f"text that has no UTF-8 form: {error}") from error


@overload
def from_plain(kind: type[T], plain: Any) -> T: ...
@overload
def from_plain(kind: Any, plain: Any) -> Any: ...
def from_plain(kind: Any, plain: Any) -> Any:
    """The noun that ``to_plain`` or a JSON parser made ``plain`` of."""
    try:
        if (check := _check(kind)) is not None:
            check(plain, "")
        if kind in _known:
            return _converted(kind, plain)
        with _learning:
            found = _converted(kind, plain)
            _known.add(kind)
            return found
    except (ValueError, RecursionError, OverflowError) as error:
        what = getattr(kind, "__name__", "document")
        raise TransferFailed(f"malformed {what}: {error}") from error


def _converted(kind: Any, plain: Any) -> Any:
    return msgspec.convert(plain, kind, strict=True, dec_hook=_decoded)


@overload
def from_json(kind: type[T], data: bytes) -> T: ...
@overload
def from_json(kind: Any, data: bytes) -> Any: ...
def from_json(kind: Any, data: bytes) -> Any:
    return from_plain(kind, parsed(data))


def parsed(data: bytes) -> Any:
    """The JSON document of a message; raises ``TransferFailed`` where it is none."""
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError) as error:
        raise TransferFailed(f"malformed update message: {error}") from error


def _encoded(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, float):  # of a subclass, such as numpy.float64
        return float(value)
    raise TypeError(f"{type(value).__name__} does not travel")


def _decoded(kind: type, value: Any) -> Any:
    if kind is torch.dtype and isinstance(value, str):
        return dtype_from_name(value)
    raise ValueError(f"expected a dtype, got {value!r:.80}")


@cache
def _added(kind: Any) -> Mapping[str, Any]:
    """The fields of a noun that were ``added``, and their defaults."""
    found = fields(kind) if is_dataclass(kind) else ()
    return {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in found
        if "added" in each.metadata
    }


@cache
def _check(kind: Any) -> _Check | None:
    """What msgspec lets pass: fields that are unknown or missing, and what is said beside."""
    if is_dataclass(kind):
        return _fields_check(kind)
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        beside = [each for each in inner[1:] if callable(each)]
        return beside[0] if beside else _check(inner[0])
    checks = [check for each in inner if each is not NoneType and (check := _check(each))]
    if not checks:
        return None
    (check,) = checks  # no noun holds two kinds of nouns in one field
    if NoneType in inner:
        return lambda plain, at: None if plain is None else check(plain, at)
    if issubclass(origin, Mapping):
        return lambda plain, at: _each(check, plain.values() if type(plain) is dict else (), at)
    return lambda plain, at: _each(check, plain if isinstance(plain, list | tuple) else (), at)


def _fields_check(kind: Any) -> _Check:
    names = frozenset(each.name for each in fields(kind))
    due = names - _added(kind).keys()
    hints = get_type_hints(kind, include_extras=True)
    inner = [(name, found) for name in names if (found := _check(hints[name]))]

    def check(plain: Any, at: str) -> None:
        if type(plain) is not dict:
            raise ValueError(f"expected an object{at and f' at {at}'}, got {type(plain).__name__}")
        if not due <= plain.keys() <= names:
            missing = ", ".join(sorted(due - plain.keys()))
            unknown = ", ".join(sorted(map(repr, plain.keys() - names)))
            told = f"missing fields: {missing}" if missing else f"unknown fields: {unknown:.200}"
            raise ValueError(f"{told}{at and f' - at {at}'}")
        for name, each in inner:
            if name in plain:
                each(plain[name], f"{at}.{name}")

    return check


def _each(check: _Check, items: Any, at: str) -> None:
    for item in items:
        check(item, at)
