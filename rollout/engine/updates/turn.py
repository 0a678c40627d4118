"""Whose turn it is to change or read the weights of one engine, and how far that update is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from rollout.engine.core import EngineCore
from rollout.engine.updates.read_lease import GIVES_WAY, ReadLease
from rollout.errors import TransferFailed, UpdateInProgress
from rollout.weight_sync.protocol.messages import Decision
from rollout.weight_sync.protocol.receipts import UpdateReceipt


class Prepared(Protocol):
    """An update whose ranks have voted yes, and which waits for a decision."""

    @property
    def update_id(self) -> str: ...

    def decided(self, decision: Decision) -> UpdateReceipt | None:
        """Commit, and return the receipt; or abort. Raises what a commit raises."""
        ...


class Turn:
    """One holder at a time: a ``Lease``, a ``ReadLease``, a ``Rollback``, or None. Thread-safe.

    ``state`` is drawn in ``protocol/messages.py``; ``prepared``: the holder, from its yes vote on.
    """

    def __init__(self, engine: EngineCore) -> None:
        self.state = "idle"
        self._what = ""  # what holds it, where that is no update
        self.prepared: Prepared | None = None
        self._engine = engine
        self.holder: object = None
        self._changed = threading.Condition()

    def take(
        self,
        holder: object,
        timeout: float,
        *,
        what: str = "",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for another's turn to end; ``UpdateInProgress`` at the deadline.

        ``what``: takes it, as those are told who wait meanwhile; "" for an update. ``check`` raises
        once nobody wants it any more: call ``look_again`` then. A ``ReadLease`` is ended by whoever
        is none and has waited for it ``GIVES_WAY`` seconds, or a quarter of ``timeout``.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._is_free:
                before, left = self.holder, deadline - time.monotonic()
                if left <= 0:
                    holds = self._what or f"another update ({self.state})"
                    raise UpdateInProgress(f"{holds} did not end within {timeout:g} s")
                is_over = partial(self._is_over, before, check)
                reader = None if isinstance(holder, ReadLease) else before
                if not isinstance(reader, ReadLease):
                    self._changed.wait_for(is_over, left)
                elif not self._changed.wait_for(is_over, min(left, GIVES_WAY, timeout / 4)):
                    reader.end()
                    break
            self.state, self.holder, self._what = "staging", holder, what

    def look_again(self) -> None:
        """Have those that wait ask their ``check``."""
        with self._changed:
            self._changed.notify_all()

    def advance(self, holder: object, state: str) -> None:
        """The next state of the holder's update; ``TransferFailed`` if its turn has ended."""
        with self._changed:
            if self.holder is not holder:
                raise TransferFailed(f"the update ended before it was {state}")
            self.state = state

    def prepare(self, holder: Prepared) -> None:
        """The holder's ranks have voted yes: it waits for a decision, and needs no stream."""
        self.advance(holder, "prepared")
        self.prepared = holder

    def end(self, holder: object) -> None:
        with self._changed:
            if self.holder is not holder:
                return
            self.holder = self.prepared = None
            self.state = "idle" if self._engine.broken is None else "broken"
            self._changed.notify_all()

    @contextmanager
    def reading(self, timeout: float) -> Iterator[ReadLease]:
        """No update begins to stage, and nothing commits, within the block, unless the lease that
        it is given is ended: an update that waits does so after ``GIVES_WAY`` seconds.
        """
        lease = ReadLease()
        self.take(lease, timeout)
        try:
            yield lease
        finally:
            self.end(lease)

    @property
    def is_read(self) -> bool:
        """Whether what is live is being read, as by who sends another engine a copy."""
        return isinstance(self.holder, ReadLease)

    @property
    def _is_free(self) -> bool:
        return self.state in ("idle", "broken")

    def _is_over(self, holder: object, check: Callable[[], None]) -> bool:
        check()
        return self._is_free or self.holder is not holder
