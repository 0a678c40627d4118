"""One engine behind its HTTP and gRPC servers, from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from rollout.api import AsyncRollout
from rollout.api.embedded import EmbeddedBackend, NearLink
from rollout.config import EngineConfig
from rollout.distributed import LOOPBACK
from rollout.errors import ConfigError, EngineClosed, WorkerDied
from rollout.metrics import EngineCounters
from rollout.rpc.status import MAX_BODY
from rollout.rpc.tls import ServerTls
from rollout.server.auth import Tokens, check_encrypted
from rollout.server.http.answers import AnswerDefaults, TokenText
from rollout.server.http.app import build_app, token_id_text
from rollout.server.http.open_routes import OpenRoutes

log = logging.getLogger(__name__)
GRACE = 5.0  # seconds that open HTTP connections get at the end


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens, "host:port" each; ``memory`` says what its ranks take.

    ``died`` is done once a rank's process has ended, with the error that every call gets then.
    ``counters`` and ``link``: the engine's, for what else runs in its process.
    """

    http: str
    grpc: str
    memory: str
    died: asyncio.Future[WorkerDied]
    counters: EngineCounters
    link: NearLink


@asynccontextmanager
async def serving(
    config: EngineConfig,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    grpc_port: int = 0,
    tokens: Tokens | None = None,
    tls: ServerTls | None = None,
    insecure: bool = False,
    open_routes: OpenRoutes | None = None,
    answers: AnswerDefaults | None = None,
    max_body_bytes: int = MAX_BODY,
) -> AsyncIterator[Addresses]:
    """Everything up inside the block, everything gone after it; port 0 picks a free one.

    ``tls`` encrypts both; with its ``client_ca`` only clients with a certificate are let in.
    ``insecure`` allows a host beyond loopback without it. ``open_routes`` answer without a token at
    an address of their own. ``max_body_bytes``: of one request. Raises ``ConfigError`` for a busy
    port or an open host without a token before any weight is read, and whatever starting the
    engine raises.
    """
    tokens = tokens or Tokens()
    tokens.check_host(host, tls=tls is not None, insecure=insecure)
    if max_body_bytes < 1:
        raise ConfigError("max_body_bytes must be 1 or more")
    if open_routes is not None:
        check_encrypted(open_routes.host, tls=tls is not None, insecure=insecure)
    context = None if tls is None else tls.context()
    rollout = AsyncRollout(**config.to_dict())
    backend = rollout.backend
    assert isinstance(backend, EmbeddedBackend)
    core = backend.core
    async with contextlib.AsyncExitStack() as stack:
        main = stack.enter_context(listen(host, port, "HTTP"))
        apps = [(main, _app(rollout, tokens, answers, max_body_bytes))]
        if grpc_port:
            listen(host, grpc_port, "gRPC").close()  # a busy port is better known before the load
        if open_routes is not None:
            beside = listen(open_routes.host, open_routes.port, "open routes")
            app = _app(rollout, Tokens(), answers, max_body_bytes, open_routes.routes)
            apps.append((stack.enter_context(beside), app))
            _warn_of(open_routes, beside)
        stack.push_async_callback(rollout.shutdown)
        for sock, app in apps:  # before the load, so that /health can say that it goes on
            await stack.enter_async_context(_http(backend, app, sock, context))
        await rollout.start()
        grpc_address = await rollout.serve(
            host,
            grpc_port,
            token=tokens.generation,
            control_token=tokens.control,
            tls=tls,
            insecure=insecure,
            max_body_bytes=max_body_bytes,
        )
        http_port = main.getsockname()[1]
        yield Addresses(
            _join(host, http_port),
            grpc_address,
            str(core.memory),
            asyncio.wrap_future(core.died),
            core.counters,
            backend.link,
        )


def _app(
    rollout: AsyncRollout,
    tokens: Tokens,
    answers: AnswerDefaults | None,
    max_body_bytes: int,
    open_routes: Sequence[str] | None = None,
) -> FastAPI:
    return build_app(
        rollout,
        tokens=tokens,
        token_text=_token_text(rollout),
        answers=answers,
        max_body_bytes=max_body_bytes,
        open_routes=open_routes,
    )


def _warn_of(open_routes: OpenRoutes, sock: socket.socket) -> None:
    at = _join(open_routes.host, sock.getsockname()[1])
    log.warning("open to anyone without a token at http=%s: %s", at, ", ".join(open_routes.routes))


def listen(host: str, port: int, what: str) -> socket.socket:
    """A listening TCP socket; ``ConfigError`` says which address is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        raise ConfigError(
            f"cannot listen on {_join(host, port)} for {what}: {error}; choose another port, or 0 "
            "for a free one"
        ) from error
    return sock


@asynccontextmanager
async def _http(
    backend: EmbeddedBackend, app: FastAPI, sock: socket.socket, context: ssl.SSLContext | None
) -> AsyncIterator[None]:
    settings = uvicorn.Config(
        app,
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
    """How an embedded engine's tokenizer writes one token, once it is loaded and if it has one."""

    def text(token: int) -> str:
        backend = rollout.backend
        tokenizer = backend.core.tokenizer if isinstance(backend, EmbeddedBackend) else None
        if tokenizer is None:
            return token_id_text(token)
        return tokenizer.decode([token], skip_special_tokens=False)

    return text


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the program that owns the loop decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
