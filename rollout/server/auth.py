"""Who may call what: bearer tokens, one for generation and one for weights and control."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum

from rollout.distributed import is_loopback
from rollout.errors import ConfigError


class Access(IntEnum):
    """What a route asks of its caller."""

    OPEN = 0  # nothing: probes have no token
    GENERATION = 1  # either token: sampling, and looking at what goes on
    CONTROL = 2  # the control token: weights, and what stops or starts others' requests


_GRPC = "/rollout.v1."
_OPEN = tuple(f"/grpc.health.v1.Health/{name}" for name in ("Check", "List", "Watch"))
_GENERATION = (
    *(f"{_GRPC}Generation/{name}" for name in ("Generate", "Chat", "Multiplex", "Tokenize")),
    f"{_GRPC}Generation/Abort",  # of requests whose ids one knows; see ABORT_ALL
    f"{_GRPC}WeightSync/Info", f"{_GRPC}WeightSync/Receipts",
    f"{_GRPC}Control/ServerInfo", f"{_GRPC}Control/Stats",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)  # fmt: skip
ABORT_ALL = f"{_GRPC}Generation/Abort(all)"  # everybody's requests, as if a route of its own
_CONTROL = (
    ABORT_ALL,
    *(f"{_GRPC}Control/{name}" for name in (
        "Pause", "Resume", "Sleep", "WakeUp", "ResetPrefixCache",
    )),
    *(f"{_GRPC}WeightSync/{name}" for name in (
        "Update", "Decide", "Serve", "SendTo", "UpdateFrom", "Rollback", "Digests",
        "PrepareRollback", "Routes", "Report",
        "InitWeightTransferEngine",
        "StartWeightUpdate", "UpdateWeights", "FinishWeightUpdate", "AbortWeightUpdate",
    )),
)  # fmt: skip
# Every route of both servers by (HTTP method, path); gRPC's are all POST. HTTP routes enter where
# they are defined (``http.guard.Routes``). A test walks both servers, so that none is forgotten.
ROUTES: dict[tuple[str, str], Access] = {
    ("POST", path): access
    for paths, access in (
        (_OPEN, Access.OPEN), (_GENERATION, Access.GENERATION), (_CONTROL, Access.CONTROL),
    )
    for path in paths
}  # fmt: skip


def access_of(method: str, path: str) -> Access:
    """What a call asks of its caller: the control token where there is no such path, and where the
    path has no such method as much as its others do.
    """
    path = path.rstrip("/") or "/"  # the router sends it on there
    found = ROUTES.get((method, path))
    if found is None:
        route = route_of(path)
        found = max((v for (_, p), v in ROUTES.items() if p == route), default=Access.CONTROL)
    return found


def route_of(path: str) -> str:
    """The route that answers at ``path``: of that name, or one that takes any end, in braces."""
    routes = {route for _, route in ROUTES}
    if path in routes:
        return path
    open_ended = (route for route in routes if "{" in route)
    return next((r for r in open_ended if path.startswith(r.partition("{")[0])), path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """``generation`` allows sampling and looking; ``control`` allows everything, weights included.

    ``control`` None: ``generation`` allows everything. Both None: no token is needed, which is
    accepted on loopback alone. Raises ``ConfigError`` for a token that is empty or not visible
    ASCII, which no header could carry.
    """

    generation: str | None = None
    control: str | None = None

    def __post_init__(self) -> None:
        for kind in ("generation", "control"):
            token = getattr(self, kind)
            if token is not None:
                check_token(token, f"the {kind} token")

    def check_host(self, host: str, *, tls: bool = False, insecure: bool = False) -> None:
        """Raise ``ConfigError`` for a ``host`` beyond loopback that is not guarded.

        It needs a token, and TLS; or ``insecure``, where something else encrypts or the network is
        trusted.
        """
        name, colon, port = host.partition(":")
        if colon and port.isdigit():
            raise ConfigError(f"the host {host!r} has a port in it: give {name!r} and the port")
        if is_loopback(host):
            return
        if self.generation is None:
            what = "replace the weights" if self.control is None else "generate"
            raise ConfigError(
                f"listening on {host} lets anyone on the network {what}: give a token (--token, "
                "token=), or listen on 127.0.0.1"
            )
        check_encrypted(host, tls=tls, insecure=insecure)

    def refusal(self, route: str, authorization: str | None, method: str = "POST") -> str | None:
        """Why a caller with this header may not call ``route``; None if it may."""
        access = access_of(method, route)
        control = self.control if self.control is not None else self.generation
        # All that could match are compared, in constant time each.
        is_generation = _matches(self.generation, authorization)
        is_control = _matches(control, authorization)
        wanted = control if access is Access.CONTROL else self.generation
        if access is Access.OPEN or wanted is None or is_control:
            return None
        if is_generation:
            if access is Access.GENERATION:
                return None
            return f"{route} needs the control token; the token given is the one for generation"
        if authorization is None:
            name = "the control token" if access is Access.CONTROL and self.control else "a token"
            return (
                f"{route} needs {name}, and none was given: pass token=... "
                "(HTTP: the header Authorization: Bearer TOKEN)"
            )
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer" or not given:
            return f"{route} needs the header Authorization: Bearer TOKEN; it has another form"
        return f"the token given for {route} is wrong: it is none that the server was started with"


def check_token(token: str, what: str) -> None:
    """Raise ``ConfigError`` where ``token`` could not be sent, or would guard nothing."""
    if not isinstance(token, str):
        raise ConfigError(f"{what} must be a text, got a {type(token).__name__}")
    if not token.strip():
        raise ConfigError(f"{what} is empty: give it a value, or leave it out")
    if not all("!" <= character <= "~" for character in token):
        raise ConfigError(f"{what} must be visible ASCII characters without spaces")


def check_encrypted(host: str, *, tls: bool, insecure: bool) -> None:
    """Raise ``ConfigError`` where a ``host`` beyond loopback would be served in clear."""
    if not (is_loopback(host) or tls or insecure):
        raise ConfigError(
            f"listening on {host} without TLS sends tokens, prompts and weights in clear: give "
            "--tls-cert and --tls-key (tls=), or allow it with --insecure (insecure=True)"
        )


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
    # Digests: of one length, whatever the lengths of the two are.
    same = hmac.compare_digest(_digest(given), _digest(token))
    return same and scheme.lower() == "bearer"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode(errors="surrogatepass")).digest()
