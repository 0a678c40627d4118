"""A source walked through by all of its ranks together: they go on, end or fail as one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from torch import Tensor

from rollout.errors import DeadlineExceeded, RolloutError, SourceFailed
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.sources.values import Incoming


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


def _nothing() -> RolloutError | None:
    return None


class Watchdog:
    """Stands beside the calling thread while that is in code of the trainer's own.

    When a wait passes ``timeout`` seconds, or ``look`` finds that the update has failed elsewhere,
    it calls ``on_failed(error)`` once, from its own thread: to free the engine and the other ranks
    meanwhile. The wait itself ends when it ends (a collective at the latest by its own group's
    timeout), and raises that error then.

    ``who``: this rank, for the message. ``look`` is asked every tenth of a second at least, and
    never runs beside anything that follows the wait, so that it may use the same links.
    """

    def __init__(
        self,
        who: str,
        timeout: float,
        on_failed: Callable[[RolloutError], None],
        look: Callable[[], RolloutError | None] = _nothing,
    ) -> None:
        self._who, self._timeout = who, timeout
        self._on_failed, self._look = on_failed, look
        self._armed: tuple[float, str] | None = None
        self._acting = threading.Lock()
        self._done = threading.Event()
        self._error: RolloutError | None = None
        self._thread = threading.Thread(target=self._watch, name="update-watchdog", daemon=True)

    @contextmanager
    def over(self, phase: str, after: str = "") -> Iterator[None]:
        """Watch what runs inside; ``after``: the last tensor that came, for the message.

        Raises ``DeadlineExceeded``, or what ``look`` found, in place of whatever came of a wait
        that was given up.
        """
        if self._error is not None:
            raise self._error
        began = time.monotonic()
        last = f" after tensor {after!r}" if after else ""
        reason = f"{self._who} did not yield within {self._timeout:g} s{last} (phase: {phase})"
        self._armed = (began + self._timeout, reason)
        try:
            yield
        except Exception as error:
            self._disarm()
            if self._error is None and time.monotonic() > began + self._timeout:
                self._fail(DeadlineExceeded(reason))  # a collective with a timeout of its own
            if self._error is not None:
                raise self._error from error
            raise
        except BaseException:
            self._disarm()
            raise
        self._disarm()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._thread.join()

    def _disarm(self) -> None:
        with self._acting:
            self._armed = None

    def _watch(self) -> None:
        while not self._done.wait(min(0.1, self._timeout / 10)):
            with self._acting:
                if self._armed is None:
                    continue
                error = self._look()
                if error is None and time.monotonic() > self._armed[0]:
                    error = DeadlineExceeded(self._armed[1])
                if error is not None:
                    self._fail(error)
                    return

    def _fail(self, error: RolloutError) -> None:
        self._error = error
        self._on_failed(error)
