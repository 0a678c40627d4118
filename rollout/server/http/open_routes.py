"""Routes that answer without a token, at an address of their own.

Some trainers' clients send no Authorization header. What they need is opened route by route, on a
listener that is bound to one network; at the other addresses the tokens are asked for as ever.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

from rollout.distributed import LOOPBACK
from rollout.errors import ConfigError
from rollout.server.http.app import DIALECTS
from rollout.wire.spellings import near

HTTP_ROUTES = frozenset(path for dialect in DIALECTS for path in dialect.routes.paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRoutes:
    """HTTP ``routes`` by their paths, and the address at which they and no others answer.

    Raises ``ConfigError`` for a path that is no route, for all of them, and for a ``host`` that
    stands for every network.
    """

    routes: Sequence[str]
    host: str = LOOPBACK
    port: int = 0

    def __post_init__(self) -> None:
        if not self.routes:
            raise ConfigError("no open routes were named: give their paths, such as /health")
        for route in self.routes:
            if route not in HTTP_ROUTES:
                raise ConfigError(f"{route!r} is no HTTP route; {_hint(route)}")
        if set(self.routes) >= HTTP_ROUTES:
            raise ConfigError("all routes cannot be opened: name those that the client needs")
        if _is_everywhere(self.host):
            raise ConfigError(
                f"open routes cannot listen on {self.host or 'every network'}: give the address "
                "that this machine has in the trainer's network"
            )


def _hint(route: str) -> str:
    if meant := near(route, sorted(HTTP_ROUTES)):
        return f"did you mean {meant}?"
    return f"routes are named one by one: {', '.join(sorted(HTTP_ROUTES))}"


def _is_everywhere(host: str) -> bool:
    try:
        return not host or ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False
