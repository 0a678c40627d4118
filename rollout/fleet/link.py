"""The way from a front to one member."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Self

from rollout.errors import ConfigError, EngineClosed, RolloutError
from rollout.rpc.address import split_address
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.membership import Grant, Standing
from rollout.weight_sync.protocol.messages import UpdateReceipt

LOOK_AGAIN = 30.0  # seconds until it is looked at once more why it does not answer


@dataclass(slots=True)
class Link:
    """One member as the front reaches it: ``client`` for calls and weights, ``control`` for what
    may not wait. ``calls``: of this front, under way there.
    """

    name: str
    client: RolloutClient
    control: RolloutClient
    token: str | None
    calls: int = 0
    met: bool = False  # whether ``client`` knows what it can do
    verbs: set[asyncio.Future[None]] = field(default_factory=set)  # of its front's ``Hold``
    held: object = None  # the life of the engine and what it is held in; None where unknown
    # By update: what it answered to the commit, and when.
    receipts: dict[str, Future[tuple[float, UpdateReceipt]]] = field(default_factory=dict)
    _looked: float = float("-inf")
    _problem: str | None = None

    @classmethod
    def to(cls, address: str, token: str | None, name: str, lease: float) -> Self:
        """Lazy: nothing is sent yet. ``ConfigError`` where ``address`` is not host:port."""
        split_address(address)
        return cls(
            name,
            RolloutClient(address, token, keeps_epoch=False),  # the fleet judges epochs itself
            RolloutClient(address, token, timeout=max(lease / 2, 0.5), keeps_epoch=False),
            token,
        )

    def ask(self, grant: Grant) -> Standing:
        """Where it stands. Raises what its answer was, or why there is none; ``ConfigError`` where
        it listens, but not to us: with TLS or without, or to HTTP.
        """
        try:
            standing = self.control.serve(grant)
        except EngineClosed as error:
            if time.monotonic() - self._looked > LOOK_AGAIN:
                self._problem = self.control.problem()
                self._looked = time.monotonic()
            if self._problem is None:
                raise
            raise ConfigError(f"cannot talk to {self.client.address}: {self._problem}") from error
        self._looked = float("-inf")
        return standing

    def close(self) -> None:
        self.client.close()
        self.control.close()


def let_go(link: Link, grant: Grant) -> RolloutError | None:
    """Tell a member that the fleet forgets; the error where it did not hear of it."""
    try:
        link.control.serve(grant)
    except RolloutError as error:
        return error
    finally:
        link.close()
    return None
