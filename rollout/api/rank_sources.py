"""What the ranks of a colocated engine send: what they hold together, or what the first one has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollout.errors import ConfigError
from rollout.weight_sync.trainer.sources.detect import detect


def looked_at(source: Any, ranks: tuple[int, ...]) -> tuple[Any, bool]:
    """``source`` as it is to be passed on, and whether ``ranks``, the engine's, hold it together.

    Collective where it is an iterator, whose first item is taken. ``ConfigError`` where other
    ranks than the engine's have a part in it.
    """
    if len(ranks) == 1:
        return source, False
    found = detect(source)
    holders = found.obj.agreement.ranks if found.kind == "source" else found.ranks
    if found.kind == "iterable":
        return Drained(iter(found.obj)), False
    if holders is None or len(holders) == 1:
        return found.obj, False
    if set(holders) != set(ranks):
        raise ConfigError(
            f"the source lies on ranks {', '.join(map(str, holders))}, but the engine's are "
            f"{', '.join(map(str, ranks))}: pass an iterator that gathers on every rank, "
            "such as ((n, p.full_tensor()) for n, p in model.named_parameters())"
        )
    return found.obj, True


class Drained:
    """An iterator that is read to its end on every rank, whatever becomes of the update."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._items

    def drain(self) -> None:
        for _ in self._items:
            pass
