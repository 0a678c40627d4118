"""One engine behind both its doors, HTTP and gRPC, from start to a clean end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from rollout.api import AsyncRollout
from rollout.api.embedded import EmbeddedBackend
from rollout.config import EngineConfig
from rollout.distributed import LOOPBACK
from rollout.errors import ConfigError, EngineClosed, WorkerDied
from rollout.metrics import EngineCounters
from rollout.server.auth import Tokens
from rollout.server.http import build_app
from rollout.server.http_answers import TokenText
from rollout.tls import ServerTls

GRACE = 5.0  # seconds that open HTTP connections get at the end


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service listens, "host:port" each; ``memory`` says what its ranks take.

    ``died`` is done once a rank's process has ended, with the error that every call gets then.
    ``counters``: the engine's, for what else runs in its process.
    """

    http: str
    grpc: str
    memory: str = ""
    died: asyncio.Future[WorkerDied] | None = None
    counters: EngineCounters | None = None


@asynccontextmanager
async def serving(
    config: EngineConfig,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    grpc_port: int = 0,
    tokens: Tokens | None = None,
    tls: ServerTls | None = None,
    logprobs_mode: str = "raw_logprobs",
) -> AsyncIterator[Addresses]:
    """Everything up inside the block, everything gone after it; port 0 picks a free one.

    ``tls`` encrypts both doors; with its ``client_ca`` only clients with a certificate are let in.
    Raises ``ConfigError`` for a busy port or an open host without a token before any weight is
    read, and whatever starting the engine raises.
    """
    tokens = tokens or Tokens()
    tokens.check_host(host)
    context = None if tls is None else tls.context()
    with listen(host, port, "HTTP") as http_socket:
        if grpc_port:
            listen(host, grpc_port, "gRPC").close()  # a busy port is better known before the load
        rollout = AsyncRollout(**config.to_dict())
        try:
            await rollout.start()
            grpc_address = await rollout.serve(
                host, grpc_port, token=tokens.generation, control_token=tokens.control, tls=tls
            )
            app = build_app(
                rollout,
                tokens=tokens,
                token_text=_token_text(rollout),
                logprobs_mode=logprobs_mode,
            )
            async with _http(rollout, app, http_socket, context):
                http_port = http_socket.getsockname()[1]
                yield Addresses(
                    _join(host, http_port),
                    grpc_address,
                    _memory(rollout),
                    _death(rollout),
                    _counters(rollout),
                )
        finally:
            await rollout.shutdown()


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
    rollout: AsyncRollout, app: FastAPI, sock: socket.socket, context: ssl.SSLContext | None
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
        # Requests end first: an open stream would hold the server until its grace is over. They
        # end with an error: a sample cut short would look like a good one to who does not ask.
        backend = rollout.backend
        if isinstance(backend, EmbeddedBackend):
            backend.end_calls(EngineClosed("the service was stopped while the call ran"))
        server.should_exit = True
        await task


def _death(rollout: AsyncRollout) -> asyncio.Future[WorkerDied] | None:
    backend = rollout.backend
    if not isinstance(backend, EmbeddedBackend):
        return None
    return asyncio.wrap_future(backend.core.died)


def _memory(rollout: AsyncRollout) -> str:
    backend = rollout.backend
    return str(backend.core.memory) if isinstance(backend, EmbeddedBackend) else ""


def _counters(rollout: AsyncRollout) -> EngineCounters | None:
    backend = rollout.backend
    return backend.core.counters if isinstance(backend, EmbeddedBackend) else None


def _token_text(rollout: AsyncRollout) -> TokenText | None:
    """How an embedded engine's tokenizer writes one token; None where there is none."""
    backend = rollout.backend
    tokenizer = backend.core.tokenizer if isinstance(backend, EmbeddedBackend) else None
    if tokenizer is None:
        return None
    return lambda token: tokenizer.decode([token], skip_special_tokens=False)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: the program that owns the loop decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
