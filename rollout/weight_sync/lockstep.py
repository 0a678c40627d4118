"""A source walked through by all of its ranks together: they go on, end or fail as one."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator

from torch import Tensor

from rollout.errors import RolloutError, SourceFailed
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.values import Incoming
from rollout.weight_sync.watchdog import Watchdog


def watchdog(
    agreement: Agreement, timeout: float, give_up: Callable[[str], None] = lambda reason: None
) -> Watchdog:
    """One for this rank: at its deadline it tells the other ranks, and calls ``give_up``."""

    def failed(error: RolloutError) -> None:
        give_up(str(error))
        agreement.give_up(error)

    who = f"trainer rank {agreement.ranks[agreement.rank]}"
    return Watchdog(who, timeout, failed, agreement.heard)


class Walk:
    """One walk; ``run`` is collective over the source's ranks.

    ``take`` gets every (name, tensor) on every rank; what it raises ends no gather alone: nothing
    more is taken here, and the next vote hears of it, as of ``failed()``. There is a vote after
    every ``step_bytes``. ``seconds`` counts the time in the source.
    """

    def __init__(
        self,
        source: Incoming,
        agreement: Agreement,
        watch: Watchdog,
        *,
        timeout: float,
        step_bytes: int,
        take: Callable[[str, Tensor], None],
        failed: Callable[[], RolloutError | None] = lambda: None,
    ) -> None:
        self._source, self._agreement, self._watch = source, agreement, watch
        self._timeout, self._step_bytes = timeout, step_bytes
        self._take, self._failed = take, failed
        self._error: RolloutError | None = None
        self._last = ""
        self.seconds = 0.0

    def run(self, flush: Callable[[], None] = lambda: None) -> None:
        """To the source's end, and a last vote; ``flush`` comes before that if nothing failed."""
        items, since = _items(self._source), 0
        ended: RolloutError | None = None
        try:
            while True:
                item, ended = self._next(items)
                if item is None:
                    break
                self._last = item[0]
                self._hand_over(*item)
                since += item[1].numel() * item[1].element_size()
                failure = self._failure()
                if since >= self._step_bytes or (failure and self._agreement.size == 1):
                    self._agreement.vote(failure, self._timeout, "bucket")
                    since = 0
            if ended is None and self._failure() is None:
                flush()
            phase = f"end, after {self._last!r}"
            self._agreement.vote(ended or self._failure(), self._timeout, phase)
        finally:
            items.close()

    def _next(
        self, items: Generator[tuple[str, Tensor]]
    ) -> tuple[tuple[str, Tensor] | None, RolloutError | None]:
        started = time.perf_counter()
        try:
            with self._watch.over("gather", self._last):
                return next(items, None), None
        except RolloutError as error:
            return None, error
        except Exception as error:  # noqa: BLE001 - whatever the trainer's code raises
            return None, source_failed(error, self._last)
        finally:
            self.seconds += time.perf_counter() - started

    def _hand_over(self, name: str, tensor: Tensor) -> None:
        if self._error is not None:
            return
        try:
            self._take(name, tensor)
        except RolloutError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - the trainer's code may run in here, too
            self._error = source_failed(error, name)

    def _failure(self) -> RolloutError | None:
        return self._error or self._failed()


def source_failed(error: Exception, last: str) -> SourceFailed:
    """An exception of the trainer's own code, after tensor ``last``, as one of the tree."""
    after = f" after {last!r}" if last else ""
    failed = SourceFailed(f"the source raised{after}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


def _items(source: Incoming) -> Generator[tuple[str, Tensor]]:
    """So that an ``__iter__`` that raises does it at the first ``next``, like any other."""
    yield from source
