"""What the ranks of a colocated engine send: what they hold together, or what the first one has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from rollout.errors import ConfigError, RolloutError
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
    """An iterator that is read to its end on every rank, whatever becomes of the update.

    ``tell``: how that went on this rank, to all; raises where it went wrong on another. On the
    first rank that is before the update may commit.
    """

    def __init__(self, items: Iterator[Any]) -> None:
        # Has no ``close``: an update that stops early would end the trainer's own generator by it.
        self._items = chain(items)
        self.tell: Callable[[Exception | None], None] = lambda failure: None

    def __iter__(self) -> Iterator[Any]:
        yield from self._items
        self._end(None)

    def drain(self) -> Exception | None:
        """Read what is left; what it raised."""
        failure: Exception | None = None
        try:
            for _ in self._items:
                pass
        except Exception as error:  # noqa: BLE001 - the trainer's own, which all ranks hear of
            failure = error
        with suppress(RolloutError):  # the update has ended, one way or the other
            self._end(failure)
        return failure

    def _end(self, failure: Exception | None) -> None:
        tell, self.tell = self.tell, lambda failure: None
        tell(failure)
