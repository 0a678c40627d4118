"""Checked reading of plain documents from a peer: every failure names the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from rollout.errors import TransferFailed
from rollout.weights import Shape

T = TypeVar("T")
Counts = dict[str, int]

MAX_INT = (1 << 63) - 1
MAX_LIST = 1 << 20
MAX_STRING = 1 << 16
MAX_DIMS = 16


class Fields:
    """Typed, bounded access to one plain mapping; every failure names the field."""

    def __init__(self, wire: Any, what: str) -> None:
        if not isinstance(wire, Mapping):
            raise TransferFailed(f"{what}: expected an object, got {type(wire).__name__}")
        self._wire, self._what = wire, what

    def raw(self, key: str) -> Any:
        try:
            return self._wire[key]
        except KeyError:
            raise TransferFailed(f"{self._what}: {key!r} is missing") from None

    def int(self, key: str, low: int = 0, high: int = MAX_INT) -> int:
        return int_of(self.raw(key), f"{self._what}: {key}", low, high)

    def string(self, key: str) -> str:
        return string_of(self.raw(key), f"{self._what}: {key}")

    def seconds(self, key: str) -> float:
        return seconds_of(self.raw(key), f"{self._what}: {key}")

    def flag(self, key: str) -> bool:
        value = self.raw(key)
        if not isinstance(value, bool):
            raise TransferFailed(f"{self._what}: {key!r} must be true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.raw(key)
        if not isinstance(value, Mapping) or len(value) > MAX_LIST:
            raise TransferFailed(f"{self._what}: {key!r} must be an object of bounded size")
        return dict(value)

    def strings(self, key: str) -> dict[str, str]:
        pairs = self.mapping(key).items()
        return {string_of(k, key): string_of(v, f"{key} {k!r:.80}") for k, v in pairs}

    def counts(self, key: str) -> Counts:
        pairs = self.mapping(key).items()
        return {string_of(k, key): int_of(v, f"{key} {k!r:.80}") for k, v in pairs}

    def list(self, key: str, item: Callable[[Any], T]) -> tuple[T, ...]:
        return list_of(self.raw(key), item, f"{self._what}: {key}")

    def optional(self, key: str, item: Callable[[Any], T]) -> T | None:
        value = self.raw(key)
        return None if value is None else item(value)


def int_of(value: Any, what: str, low: int = 0, high: int = MAX_INT) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise TransferFailed(f"{what}: {value!r:.40} is not an integer in {low}..{high}")
    return value


def string_of(value: Any, what: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_STRING:
        raise TransferFailed(f"{what}: expected a string of bounded length, got {value!r:.40}")
    return value


def seconds_of(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise TransferFailed(f"{what}: {value!r:.40} is not a number of seconds")
    return float(value)


def list_of(value: Any, item: Callable[[Any], T], what: str) -> tuple[T, ...]:
    if not isinstance(value, list | tuple) or len(value) > MAX_LIST:
        raise TransferFailed(f"{what}: expected a list of bounded length")
    return tuple(item(x) for x in value)


def ints_of(value: Any) -> Shape:
    if not isinstance(value, list | tuple) or len(value) > MAX_DIMS:
        raise TransferFailed(f"expected at most {MAX_DIMS} integers, got {value!r:.80}")
    return tuple(int_of(n, "coordinate") for n in value)


def row_of(value: Any, length: int, what: str) -> list[Any]:
    if not isinstance(value, list | tuple) or len(value) != length:
        raise TransferFailed(f"{what}: expected {length} fields, got {value!r:.80}")
    return list(value)
