"""Updates from directories that the engine's own host reads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rollout.errors import UpdateInProgress
from rollout.weight_sync.protocol.receipts import UpdateReceipt


class ReadOnce:
    """Updates that the server reads itself, one after the other.

    One that is asked for again by its id is made again only where it is no longer what is live.
    """

    def __init__(self, is_live: Callable[[UpdateReceipt], bool]) -> None:
        self._is_live = is_live
        self._lock = threading.Lock()
        self._last: tuple[str, UpdateReceipt] | None = None  # an earlier one cannot be live

    def run(
        self, update_id: str, timeout: float, read: Callable[[], UpdateReceipt]
    ) -> UpdateReceipt:
        """What ``read`` gives, or gave; ``UpdateInProgress`` where another takes ``timeout``."""
        if not self._lock.acquire(timeout=timeout):
            raise UpdateInProgress(f"another directory was still being read after {timeout:g} s")
        try:
            if update_id and self._last is not None:
                made, receipt = self._last
                if made == update_id and self._is_live(receipt):
                    return receipt
            receipt = read()
            self._last = update_id, receipt
            return receipt
        finally:
            self._lock.release()
