"""A deadline on a wait that cannot be interrupted: a collective, or the trainer's own code."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rollout.errors import DeadlineExceeded, RolloutError


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
