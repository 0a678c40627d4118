"""Who serves, as the calls of a front need it."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from rollout.distributed.futures import resolve
from rollout.errors import DeadlineExceeded, EngineClosed, EngineError
from rollout.fleet.link import Link
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.membership import Standing

T = TypeVar("T")
log = logging.getLogger(__name__)

LOOK = 0.1  # seconds between looks at whether a member that is asked serves still


class Directory(ABC):
    """The members of one fleet: its coordinator's own (``Fleet``), or what that one has told
    (``RoutedFleet``). Thread-safe. ``lease``: seconds for which a member that hears nothing serves.
    ``parted``: a version that no request has gone on to from an older one.
    """

    lease: float
    parted: int

    @property
    @abstractmethod
    def closed(self) -> bool: ...

    @property
    @abstractmethod
    def fleet_id(self) -> int:
        """Under whose leases members serve; 0 where nobody has said."""

    @property
    @abstractmethod
    def epoch(self) -> int: ...

    @property
    @abstractmethod
    def version(self) -> int: ...

    @property
    @abstractmethod
    def adapters(self) -> Mapping[str, int]:
        """The version of each that every member holds which serves."""

    @abstractmethod
    def links(self) -> list[Link]:
        """Of all members."""

    @abstractmethod
    def serving(self) -> list[Link]: ...

    @abstractmethod
    def with_calls(self) -> list[Link]:
        """Of members where calls may run: those that serve, and those that are about to end."""

    def is_out(self, link: Link, life: int | None) -> bool:
        """Whether a member serves nobody in that life any more, as far as is known here."""
        return self.life(link.name) != life or link not in self.with_calls()

    @abstractmethod
    def standings(self) -> dict[str, Standing]:
        """The last word of each member that serves."""

    @abstractmethod
    def life(self, name: str) -> int | None:
        """The epoch in which a member was last heard of."""

    @abstractmethod
    def members(self) -> list[dict[str, Any]]:
        """A row for each, for people."""

    @abstractmethod
    def add(
        self,
        address: str,
        token: str | None = None,
        name: str | None = None,
        *,
        tls_server_name: str | None = None,
        ask: bool = False,
    ) -> str:
        """See ``Fleet``; ``ConfigError`` where another front coordinates, as of ``leave``."""

    @abstractmethod
    def leave(self, name: str, notice: float) -> None: ...

    @abstractmethod
    def whys(self) -> str:
        """Why members do not serve that do not."""

    @abstractmethod
    def close(self) -> None: ...

    def one(self) -> Link:
        """Any member that serves; ``EngineClosed`` where none does."""
        links = self.serving()
        if not links:
            raise EngineClosed(f"no member of the fleet serves: {self.whys() or 'it has none'}")
        return min(links, key=lambda link: link.calls)

    def ask_any(self, verb: Callable[[RolloutClient], T]) -> T:
        """The answer of a member that serves; where one is silent until it does not, another's."""
        links = sorted(self.serving(), key=lambda link: link.calls)
        for link in links[:-1]:
            try:
                return self._answer(link, verb)
            except EngineError as error:
                log.info("member %s did not answer: %s", link.name, error)
        return verb((links[-1:] or [self.one()])[0].client)

    def _answer(self, link: Link, verb: Callable[[RolloutClient], T]) -> T:
        """As ``verb`` gives it; one that hangs is waited for until its lease is over."""
        life, answer = self.life(link.name), Future[T]()

        def ask() -> None:
            resolve(answer, lambda: verb(link.client))

        threading.Thread(target=ask, name="rollout-fleet-ask", daemon=True).start()
        while not wait((answer,), LOOK).done:
            if self.is_out(link, life):
                raise DeadlineExceeded("it serves no more, and has said nothing")
        return answer.result()
