"""What every HTTP request passes before its route: its token, whose page sent it, and the size of
its body.

Routes are defined here with what they ask of their caller, so that none can forget to.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Annotated, Any
from urllib.parse import urlsplit

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollout.api import AsyncRollout
from rollout.errors import ConfigError, EngineClosed
from rollout.server.auth import ROUTES, Access, Tokens, access_of, route_of
from rollout.server.http.control_params import StrictRoute
from rollout.server.http.errors import ErrorShape, error_body, shaped
from rollout.server.http.json_response import JSONResponse
from rollout.server.verbs import Verbs

AT_ONCE: set[tuple[str, str]] = set()  # (HTTP method, path), beside the open ones


class Routes(APIRouter):
    """Routes that each say who may call them: ``@routes.on("POST", "/pause", Access.CONTROL)``."""

    def __init__(self) -> None:
        super().__init__(route_class=StrictRoute)

    @property
    def paths(self) -> frozenset[str]:
        return frozenset(route.path for route in self.routes if isinstance(route, APIRoute))

    def on(
        self, method: str, path: str, access: Access, *, at_once: bool = False
    ) -> Callable[[Any], Any]:
        """``at_once``: it answers also while the engine loads, as routes that are open do."""
        ROUTES[method, path] = access
        if at_once:
            AT_ONCE.add((method, path))
        return self.api_route(path, methods=[method])


def include(app: FastAPI, routes: Routes) -> None:
    """Add routes to an application; ``ConfigError`` for one that does not say who may call it."""
    for route in routes.routes:
        path, methods = getattr(route, "path", ""), getattr(route, "methods", None) or {""}
        if any((method, path) not in ROUTES for method in methods):
            raise ConfigError(f"{route} does not say who may call it: define it by Routes.on")
    app.include_router(routes)


# These are coroutines for what they cost: others would each take a thread's turn.
async def _rollout_of(request: Request) -> AsyncRollout:
    rollout: AsyncRollout = request.app.state.rollout
    return rollout


Engine = Annotated[AsyncRollout, Depends(_rollout_of)]  # of the application that has the route


async def _verbs_of(request: Request, rollout: Engine) -> Verbs:
    request.state.is_weight_verb = True  # so that its errors are none that clients try again for
    client = request.client  # a proxy's word for it has no port
    peer = f"{client.host}:{client.port}" if client is not None and client.port else ""
    return Verbs(rollout, peer)


WeightVerbs = Annotated[Verbs, Depends(_verbs_of)]  # of that engine, as this connection's


class Guard:
    """An ASGI application before another one; it refuses before anything of a body is read.

    ``tokens``: who may call what. ``open_routes``: the routes of a listener where these answer
    without a token and no others do. ``loading``: why none can answer yet but those that need
    no engine; "" once they can. ``max_body_bytes``: of one request, whether it announces its length
    or not. ``shapes``: of the errors, by path.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        tokens: Tokens,
        max_body_bytes: int,
        open_routes: Collection[str] | None = None,
        loading: Callable[[], str] = lambda: "",
        shapes: Mapping[str, ErrorShape] = MappingProxyType({}),
    ) -> None:
        self._shapes = shapes
        self._app, self._tokens, self._limit = app, tokens, max_body_bytes
        self._open, self._loading = open_routes, loading

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        refused = self._refusal(scope["method"], scope["path"], headers)
        if refused is not None:
            await refused(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _refusal(self, method: str, path: str, headers: Headers) -> JSONResponse | None:
        def refuse(text: str, kind: str, status: int) -> JSONResponse:
            asks = {"WWW-Authenticate": "Bearer"} if status == 401 else None
            return JSONResponse(*shaped(self._shapes, path, text, kind, status), asks)

        if self._open is not None:
            if route_of(path) not in self._open:
                text = f"{path} is none of the routes that are open at this address"
                return refuse(text, "NotFoundError", 404)
        elif why := self._tokens.refusal(path, _given(headers), method):
            return refuse(why, "AuthenticationError", 401)
        is_control = access_of(method, path) is Access.CONTROL
        if is_control and self._tokens == Tokens() and (why := _foreign_page(headers)):
            remedy = "start the server with a --control-token, and send that"
            if self._open is not None:
                remedy = "send a token, to the address where tokens are asked for"
            return refuse(f"{path} is refused to a browser {why}: {remedy}", "Forbidden", 403)
        needs_engine = access_of(method, path) is not Access.OPEN and (method, path) not in AT_ONCE
        if needs_engine and (why := self._loading()):
            return JSONResponse(*error_body(EngineClosed(why)))
        announced = headers.get("content-length", "")
        if announced.isdecimal() and int(announced[:20]) > self._limit:
            return refuse(self._too_large(), "InvalidRequest", 413)
        return None

    def _bounded(self, receive: Receive) -> Receive:
        """``receive`` that ends the request once its body has grown past the limit."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._limit:
                raise HTTPException(413, self._too_large())
            return message

        return bounded

    def _too_large(self) -> str:
        return (
            f"the body is larger than the {self._limit} bytes that this server takes; send less at "
            "a time, or start it with a larger --max-body-bytes"
        )


def _foreign_page(headers: Headers) -> str:
    """Why a browser may have sent this for a page of another site; "" where none has.

    Any page may send requests to a server on its reader's machine (CSRF), and one whose host name
    is made to point there (DNS rebinding) is of the same origin to the browser. That is why a host
    must be an address or "localhost", as all that is served without a token is. Clients that are
    no browsers send neither header.
    """
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    if site is None and origin is None:
        return ""
    host = headers.get("host", "").lower()
    if site in ("cross-site", "same-site"):
        return f"for a page of another site (Sec-Fetch-Site: {site})"
    if origin is not None and origin.lower().partition("://")[2] != host:
        return f"for a page of {origin:.100}, which is not {host:.100}"
    if not _is_address(host):
        return f"at {host:.100}, a name that any site may have given to this machine"
    return ""


def _is_address(host: str) -> bool:
    """Whether a ``Host`` is "localhost" or an IP address, with a port or without."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def _given(headers: Headers) -> str | None:
    """The caller's token as a bearer's; Tinker's clients send it as ``X-API-Key``."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (None if key is None else f"Bearer {key}")
