"""How long an engine may serve: a member of a fleet does so under a lease alone."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from rollout.errors import ConfigError, EngineClosed

log = logging.getLogger(__name__)
LEAVING = (
    "the service is about to end, and takes no new requests: ask another, or again once it is back"
)
# A host that was suspended has not outlived its lease by it: this clock goes on meanwhile, which
# ``time.monotonic`` does not on Linux.
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class ServingLease:
    """Thread-safe: one number, by ``clock``. An engine that got no grant serves for good.

    Read before a request is taken and before tokens are handed out, so that none leaves an engine
    whose fleet may have gone on without it. ``on_grant`` is called after each, by who grants.
    """

    def __init__(self) -> None:
        self.on_grant: Callable[[], None] = lambda: None
        self._until: float | None = None
        self._returns: float | None = None  # when it serves alone again, as before its fleet came
        self._newest = (0, 0)
        self._fleet = 0  # which one has granted last
        self._removed = False  # whether it has let this engine go
        self._lock = threading.Lock()

    @staticmethod
    def clock() -> float:
        """Seconds, never set, suspension of the host included: what grants name."""
        return time.clock_gettime(_CLOCK)

    def check_fleet(self, fleet: int) -> None:
        """``ConfigError`` where another ``fleet`` than that (0: one that does not say) may grant,
        for as long as what it has granted lasts.
        """
        left = self.left
        if self._is_another(fleet) and left is not None and left > 0:
            raise ConfigError(
                "this engine is a member of another fleet, whose front grants it leases: remove it "
                "there first (DELETE /fleet/members), or end that front; a front that is to take "
                "the fleet over needs the same --record"
            )

    def _is_another(self, fleet: int) -> bool:
        return bool(fleet and self._fleet and fleet != self._fleet)

    def grant(
        self,
        until: float | None,
        order: tuple[int, int],
        returns: float | None = None,
        fleet: int = 0,
        *,
        removed: bool = False,
    ) -> None:
        """Unless a grant that comes later in the ``order`` they were made in has been here.

        ``returns``: of a fleet that has not begun; when an engine that it found serving alone does
        so again, unless it hears of the fleet until then. ``removed``: of one that is let go.
        """
        with self._lock:
            if self._is_another(fleet):  # which counts anew
                self._newest = (0, 0)
            self._fleet = fleet or self._fleet
            if order >= self._newest:
                was_alone = self._until is None or self._returns is not None
                self._returns = returns if was_alone else None
                self._until, self._newest, self._removed = until, order, removed
        self.on_grant()

    @property
    def fleet(self) -> int:
        """Under whose lease it is; 0: nobody's, or of one that does not say."""
        return 0 if self.left is None else self._fleet

    def check_under(self, fleet: int) -> None:
        """``EngineClosed`` where it does not serve for ``fleet``: as one that was started anew, or
        was let go, of which a front may not have heard yet.
        """
        if self.left is None or self._is_another(fleet):
            raise EngineClosed(
                "this engine is no member of the fleet that the front asks for: it was started "
                "anew, or was let go; it serves again once the fleet has taken it in"
            )

    def check_alone(self, what: str) -> None:
        """``ConfigError`` where a fleet grants: its members change by its own updates alone."""
        if self.left is not None:
            raise ConfigError(
                f"{what}: this engine is a member of a fleet, whose members hold the same weights "
                "and adapters: ask the fleet's own address"
            )

    def check_own_update(self) -> None:
        """``ConfigError`` while it serves for a fleet, whose commits are decided by its front: one
        of its own would leave it with weights that no other member has. What is brought to it while
        it does not serve, as by another member, is judged before it does.
        """
        if (left := self.left) is not None and left > 0:
            raise ConfigError(
                "this engine is a member of a fleet, whose members change their weights together: "
                "send the update to the fleet's own address (or remove the engine there, by DELETE "
                "/fleet/members, and start it again, for it to serve alone)"
            )

    @property
    def left(self) -> float | None:
        """Seconds until it is over, none or fewer where it is; None where it lasts for good."""
        if self._until is None:
            return None
        with self._lock:
            until, returns, now = self._until, self._returns, self.clock()
            if until is None:
                return None
            if returns is None or now < returns:
                return until - now
            self._until = self._returns = None
            self._newest, self._fleet = (0, 0), 0  # another fleet counts anew
            log.warning(
                "the fleet that took this engine in has ended, or cannot be reached, and never "
                "began: the engine serves alone again, as before"
            )
        return None

    @property
    def is_over(self) -> bool:
        left = self.left
        return left is not None and left <= 0

    @property
    def refusal(self) -> EngineClosed:
        if self._removed:
            return EngineClosed(
                "this engine was removed from its fleet, and serves nobody: ask the fleet's own "
                "address, restart this engine for it to serve alone, or add it to a fleet "
                "(POST /fleet/members)"
            )
        return EngineClosed(
            "this member of a fleet may not serve: its lease has run out, as its coordinator has "
            "fenced it or cannot reach it; ask the fleet's own address, start the fleet's front "
            "again, or restart this engine for it to serve alone"
        )
