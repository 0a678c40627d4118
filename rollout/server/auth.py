"""Who may call what: bearer tokens, one for generation and one for weights and control."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass

from rollout.errors import ConfigError

# Open to holders of the generation token although they belong to the other services.
_READ_ONLY = frozenset(
    {
        "/rollout.v1.Control/ServerInfo",
        "/rollout.v1.Control/Stats",
        "/rollout.v1.WeightSync/Info",
        "/rollout.v1.WeightSync/Receipts",
    }
)
_OPEN = ("/grpc.health.v1.Health/",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """``generation`` allows sampling and looking; ``control`` allows everything, weights included.

    ``control`` None: ``generation`` allows everything. Both None: no token is needed, which is
    accepted on loopback alone.
    """

    generation: str | None = None
    control: str | None = None

    def check_host(self, host: str) -> None:
        """Raise ``ConfigError`` when ``host`` is reachable from outside and no token guards it."""
        if self.generation is None and not is_loopback(host):
            raise ConfigError(
                f"listening on {host} lets anyone on the network replace the weights: give a "
                "token, or listen on 127.0.0.1"
            )

    def allows(self, method: str, authorization: str | None) -> bool:
        """Whether a header ``Bearer TOKEN`` may call ``/package.Service/Method``."""
        if method.startswith(_OPEN):
            return True
        sampling = method.startswith("/rollout.v1.Generation/") or method in _READ_ONLY
        sampling = sampling or method.startswith("/grpc.reflection.")
        if sampling:
            return self.allows_generation(authorization)
        return self.allows_control(authorization)

    def allows_generation(self, authorization: str | None) -> bool:
        return self.generation is None or (
            _matches(self.generation, authorization) or self.allows_control(authorization)
        )

    def allows_control(self, authorization: str | None) -> bool:
        wanted = self.control if self.control is not None else self.generation
        return wanted is None or _matches(wanted, authorization)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def authorization_of(metadata: Mapping[str, str] | object) -> str | None:
    """The authorization header among gRPC's invocation metadata."""
    for key, value in metadata or ():  # type: ignore[attr-defined]
        if key == "authorization":
            return str(value)
    return None


def _matches(token: str | None, authorization: str | None) -> bool:
    if token is None or authorization is None:
        return False
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())
