"""Which beginnings of prompts a member of a fleet has had lately, for fronts that saw them not."""

from __future__ import annotations

import threading
import time

import numpy as np

from rollout.errors import InvalidRequest
from rollout.weight_sync.protocol.membership import MAX_REPORT

KEPT = 1 << 14  # digests
WIDTH = 8  # bytes of one
LONGEST = 1024 * WIDTH  # bytes of one prompt's
ANEW = 3  # of a prompt's last ones are noted each time they come: where they went last counts
ENTRY = np.dtype([("digest", "<u8"), ("age", "<f4")])
MOST = MAX_REPORT // ENTRY.itemsize  # in one report


class RecentBeginnings:
    """Thread-safe: a ring, in which each digest has a serial number, from 1 on.

    Digests are whatever fronts send: nothing follows from them but where they send the next one.
    """

    def __init__(self) -> None:
        self._digests = np.zeros(KEPT, np.uint64)
        self._noted = np.zeros(KEPT)  # seconds
        self._serials: dict[int, int] = {}
        self._last = 0
        self._lock = threading.Lock()

    def add(self, packed: bytes) -> None:
        """Of one prompt, one digest after the other; ``InvalidRequest`` where they are none."""
        if len(packed) % WIDTH or len(packed) > LONGEST:
            raise InvalidRequest(
                f"{len(packed)} bytes are no digests of a prompt's beginnings: {WIDTH} bytes each, "
                f"and {LONGEST} at most"
            )
        found = np.frombuffer(packed, "<u8").tolist()
        with self._lock:
            now = time.monotonic()
            for number, digest in enumerate(found, ANEW - len(found)):
                if number >= 0 or digest not in self._serials:
                    self._note(digest, now)

    def since(self, serial: int) -> tuple[int, bytes]:
        """Those behind ``serial``, the oldest first, as a ``Report`` has them, and the serial of
        the last one of them.
        """
        with self._lock:
            first = max(serial, self._last - KEPT) if serial <= self._last else self._last - KEPT
            first = max(first, 0)
            last = min(self._last, first + MOST)
            places = np.arange(first, last) % KEPT
            entries = np.empty(last - first, ENTRY)
            entries["digest"] = self._digests[places]
            entries["age"] = time.monotonic() - self._noted[places]
            return last, entries.tobytes()

    def _note(self, digest: int, now: float) -> None:
        place = self._last % KEPT  # of serial ``_last + 1``
        old = int(self._digests[place])
        if self._serials.get(old) == self._last + 1 - KEPT:
            del self._serials[old]
        self._last += 1
        self._digests[place], self._noted[place] = digest, now
        self._serials[digest] = self._last
