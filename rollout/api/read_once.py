"""Updates from directories that the engine's own host reads."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable

from rollout.errors import UpdateInProgress
from rollout.weight_sync.engine.coordinator import KEPT_RECEIPTS
from rollout.weight_sync.protocol.messages import UpdateReceipt


class ReadOnce:
    """Updates that the server reads itself, one after the other; by id, each is made once."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._made: OrderedDict[str, UpdateReceipt] = OrderedDict()

    def run(
        self, update_id: str, timeout: float, read: Callable[[], UpdateReceipt]
    ) -> UpdateReceipt:
        """What ``read`` gives, or gave; ``UpdateInProgress`` where another takes ``timeout``."""
        if not self._turn.acquire(timeout=timeout):
            raise UpdateInProgress(f"another directory was still being read after {timeout:g} s")
        try:
            receipt = self._made.get(update_id) or read()
            if update_id:
                self._made[update_id] = receipt
                while len(self._made) > KEPT_RECEIPTS:
                    self._made.popitem(last=False)
            return receipt
        finally:
            self._turn.release()
