"""What ends the engine's side of an update while the trainer hangs in code of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Self

from rollout.errors import DeadlineExceeded, RolloutError
from rollout.weight_sync.trainer.rank_group import RankGroup


class Watchdog:
    """Stands beside the calling thread while that is in code of the trainer's own.

    When a wait passes ``timeout`` seconds, or the ``group`` hears that the update has failed on
    another rank, it calls ``give_up``, which frees the engine, and tells the other ranks: once,
    from its own thread. The wait itself ends when it ends (a collective at the latest by its own
    group's timeout), and raises that error then.

    The group is asked every tenth of a second at least, and never beside anything that follows the
    wait, which may use the same links.
    """

    def __init__(
        self, group: RankGroup, timeout: float, give_up: Callable[[str], None] = lambda reason: None
    ) -> None:
        self._group, self._timeout, self._give_up = group, timeout, give_up
        self._armed: tuple[float, str] | None = None
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: RolloutError | None = None
        self._thread = threading.Thread(target=self._watch, name="update-watchdog", daemon=True)

    @contextmanager
    def over(self, phase: str, after: str = "") -> Iterator[None]:
        """Watch what runs inside; ``after``: the last tensor that came, for the message.

        Raises ``DeadlineExceeded``, or what the group heard, in place of whatever came of a wait
        that was given up.
        """
        if self._error is not None:
            raise self._error
        began = time.monotonic()
        last = f" after tensor {after!r}" if after else ""
        who = f"trainer rank {self._group.ranks[self._group.rank]}"
        reason = f"{who} did not yield within {self._timeout:g} s{last} (phase: {phase})"
        self._armed = (began + self._timeout, reason)
        try:
            yield
        except Exception as error:
            late = self._armed is not None and time.monotonic() > self._armed[0]
            self._disarm()
            if self._error is None and late:
                self._fail(DeadlineExceeded(reason))  # a collective with a timeout of its own
            if self._error is not None:
                raise self._error from error
            raise
        finally:
            self._disarm()
        if self._error is not None:
            raise self._error

    def check(self) -> None:
        """Inside ``over``: raise where the wait was given up."""
        if self._error is not None:
            raise self._error

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Inside ``over``: a wait that is not for the trainer, with a deadline and an error of its
        own. Its time does not count here.
        """
        with self._lock:
            armed, began = self._armed, time.monotonic()
            if armed is not None:
                self._armed = (inf, armed[1])
        try:
            yield
        finally:
            with self._lock:
                if armed is not None:
                    self._armed = (armed[0] + time.monotonic() - began, armed[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    def _disarm(self) -> None:
        with self._lock:
            self._armed = None

    def _watch(self) -> None:
        while not self._done.wait(min(0.1, self._timeout / 10)):
            with self._lock:
                if self._armed is None:
                    continue
                error = self._group.heard()
                if error is None and time.monotonic() > self._armed[0]:
                    error = DeadlineExceeded(self._armed[1])
                if error is not None:
                    self._fail(error)
                    return

    def _fail(self, error: RolloutError) -> None:
        self._error = error
        self._give_up(str(error))
        self._group.give_up(error)
