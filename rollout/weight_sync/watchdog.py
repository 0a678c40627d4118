"""A deadline on a wait that cannot be interrupted: a collective, or the trainer's own iterator."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self


class Watchdog:
    """Calls ``on_late(reason)`` once, from its own thread, when an armed wait passes its deadline.

    The wait itself ends by the trainer's own group timeout; this frees the engine's side meanwhile.
    """

    def __init__(self, timeout: float, on_late: Callable[[str], None]) -> None:
        self._timeout, self._on_late = timeout, on_late
        self._armed: tuple[float, str] | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="update-watchdog", daemon=True)

    def arm(self, who: str, phase: str, last: str) -> None:
        after = f" after tensor {last!r}" if last else ""
        reason = f"{who} did not yield within {self._timeout:g} s{after} (phase: {phase})"
        self._armed = (time.monotonic() + self._timeout, reason)

    def disarm(self) -> None:
        self._armed = None

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

    def _watch(self) -> None:
        while not self._done.wait(min(0.1, self._timeout / 10)):
            armed = self._armed
            if armed is not None and time.monotonic() > armed[0]:
                self._on_late(armed[1])
                return
