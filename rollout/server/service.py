"""An engine or a fleet behind its HTTP and gRPC servers, from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import uvicorn
from fastapi import FastAPI

from rollout.api import AsyncRollout
from rollout.api.backend import Backend
from rollout.distributed import LOOPBACK, host_port
from rollout.errors import ConfigError, EngineClosed
from rollout.rpc.status import MAX_BODY
from rollout.rpc.tls import ServerTls
from rollout.server.auth import Tokens, check_encrypted
from rollout.server.http.app import build_app
from rollout.server.http.connection import HttpConnection
from rollout.server.http.open_routes import OpenRoutes
from rollout.server.http.openai.answer_defaults import AnswerDefaults
from rollout.server.http.openai.answers import TokenText, token_id_text
from rollout.server.http.responses import tokenizer_of
from rollout.server.http.root_path import RootPath, check_root_path
from rollout.server.listening import listen

log = logging.getLogger(__name__)
GRACE = 5.0  # seconds that open HTTP connections get at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a service listens, and whom it lets in; port 0 picks a free one.

    ``tls`` encrypts both; with its ``client_ca`` only clients with a certificate are let in.
    ``insecure`` allows a host beyond loopback without it. ``open_routes`` answer without a token at
    an address of their own. ``max_body_bytes``: of one request. HTTP also answers under
    ``root_path``. ``adapters``: PEFT directories by name, loaded before anything is served. Raises
    ``ConfigError`` for an open host without a token.
    """

    host: str = LOOPBACK
    port: int = 0
    grpc_port: int = 0
    tokens: Tokens = field(default_factory=Tokens)
    tls: ServerTls | None = None
    insecure: bool = False
    open_routes: OpenRoutes | None = None
    answers: AnswerDefaults | None = None
    max_body_bytes: int = MAX_BODY
    root_path: str = ""
    adapters: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_root_path(self.root_path)
        encrypted = self.tls is not None
        self.tokens.check_host(self.host, tls=encrypted, insecure=self.insecure)
        if self.max_body_bytes < 1:
            raise ConfigError("max_body_bytes must be 1 or more")
        if self.open_routes is not None:
            check_encrypted(self.open_routes.host, tls=encrypted, insecure=self.insecure)


@asynccontextmanager
async def serving(rollout: AsyncRollout, at: Listening) -> AsyncIterator[tuple[str, str]]:
    """Everything up inside the block, everything gone after it; where HTTP and gRPC listen,
    "host:port" each.

    Raises ``ConfigError`` for a busy port before any weight is read, and whatever starting
    ``rollout`` raises; its engine or fleet is shut down at the end.
    """
    context = None if at.tls is None else at.tls.context()
    async with contextlib.AsyncExitStack() as stack:
        apps = [(stack.enter_context(sock), app) for sock, app in _apps(rollout, at)]
        if at.grpc_port:  # a busy port is better known before the load
            listen(at.host, at.grpc_port, "gRPC").close()
        stack.push_async_callback(rollout.shutdown)
        for sock, app in apps:  # before the load, so that /health can say that it goes on
            await stack.enter_async_context(
                _http(rollout.backend, RootPath(app, at.root_path), sock, context)
            )
        await rollout.start()
        for name, path in at.adapters.items():
            await rollout.load_lora_adapter(name, path)
        grpc = await rollout.serve(
            at.host, at.grpc_port, token=at.tokens.generation, control_token=at.tokens.control,
            tls=at.tls, insecure=at.insecure, max_body_bytes=at.max_body_bytes,
        )  # fmt: skip
        for _, app in apps:
            app.state.grpc_port = grpc.rpartition(":")[2]
        yield host_port(at.host, apps[0][0].getsockname()[1]), grpc


def _apps(rollout: AsyncRollout, at: Listening) -> Iterator[tuple[socket.socket, FastAPI]]:
    """The HTTP server's socket and application, and those of the open routes."""
    yield listen(at.host, at.port, "HTTP"), _app(rollout, at, at.tokens)
    if (open_routes := at.open_routes) is not None:
        sock = listen(open_routes.host, open_routes.port, "open routes")
        log.warning(
            "open to anyone without a token at http=%s: %s",
            host_port(open_routes.host, sock.getsockname()[1]),
            ", ".join(open_routes.routes),
        )
        yield sock, _app(rollout, at, Tokens(), open_routes.routes)


def _app(
    rollout: AsyncRollout, at: Listening, tokens: Tokens, open_routes: Sequence[str] | None = None
) -> FastAPI:
    return build_app(
        rollout, tokens=tokens, token_text=_token_text(rollout), answers=at.answers,
        max_body_bytes=at.max_body_bytes, open_routes=open_routes,
    )  # fmt: skip


@asynccontextmanager
async def _http(
    backend: Backend, app: RootPath, sock: socket.socket, context: ssl.SSLContext | None
) -> AsyncIterator[None]:
    settings = uvicorn.Config(
        app,
        http=HttpConnection,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=int(GRACE),
    )
    settings.load()
    settings.ssl = context
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[sock]))
    try:
        while not server.started:
            if task.done():
                await task
                raise ConfigError("the HTTP server ended while it started")
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = True  # no request is taken from here on
        # What runs is ended: an open stream would hold the server until its grace is over. It ends
        # with an error: a sample cut short would look like a good one to who does not ask.
        if not backend.is_loading:
            backend.end_calls(EngineClosed("the service was stopped while the call ran"))
        await task


def _token_text(rollout: AsyncRollout) -> TokenText:
    """How the engine's tokenizer writes one token, once it is loaded and if there is one here."""

    def text(token: int) -> str:
        if (tokenizer := tokenizer_of(rollout)) is None:
            return token_id_text(token)
        return tokenizer.decode([token], skip_special_tokens=False)

    return text


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the program that owns the loop decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
