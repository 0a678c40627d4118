"""What ``rollout serve`` and ``rollout fleet`` share: where to listen, and until when."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rollout.cli.flags import TOKEN, Row, add_rows, environment, token_of
from rollout.distributed import LOOPBACK
from rollout.distributed.interpreter import settle
from rollout.errors import ConfigError, EngineClosed, RolloutError
from rollout.rpc.status import MAX_BODY
from rollout.rpc.tls import ServerTls

if TYPE_CHECKING:
    from rollout.api.backend import Backend
    from rollout.config import EngineConfig
    from rollout.errors import WorkerDied
    from rollout.server.http.open_routes import OpenRoutes
    from rollout.server.http.openai.answer_defaults import AnswerDefaults
    from rollout.server.service import Listening

log = logging.getLogger(__name__)
_DEATH_WAIT = 5.0  # seconds in which calls still hear that a rank has died, before the end
RANK_DIED = 1  # exit status
MEMBER_TIMEOUT = 10.0  # seconds that a member of a fleet has where --shutdown-timeout is not given
_LOOK = 0.05  # seconds between looks at whether all has ended
LAST_WORD = 5.0  # seconds until a lease is given back, or is over by itself

LISTENING: tuple[Row, ...] = (
    ("--host", "HOST", LOOPBACK, "address to listen on"),
    ("--port", "N", 8000, "HTTP port; 0 picks a free one"),
    ("--grpc-port", "N", 50051, "gRPC port; 0 picks a free one"),
    TOKEN,
    ("--control-token", "TOKEN", None,
     "token for weights and control (default: --token allows them too)"),
    ("--tls-cert", "PEM", None, "certificate of both servers, HTTP and gRPC"),
    ("--tls-key", "PEM", None, "its key"),
    ("--tls-client-ca", "PEM", None,
     "let in only clients with a certificate of this authority, over HTTP and gRPC"),
    ("--insecure", "", False,
     "allow a --host beyond loopback without TLS: tokens and weights travel in clear"),
    ("--open-routes", "PATH[,PATH...]", None,
     "HTTP routes that need no token, for clients that send none; at --open-port alone, where no "
     "others answer"),
    ("--open-host", "HOST", LOOPBACK,
     "address of the open routes: this machine's in the trainer's network"),
    ("--open-port", "N", None, "their port; 0 picks a free one, which the log names"),
    ("--max-body-bytes", "N", MAX_BODY, "largest request that is read, HTTP or gRPC (2 GiB there)"),
    ("--root-path", "PATH", "",
     "path under which a proxy has put this server: HTTP answers there, too"),
    ("--response-role", "NAME", "assistant", "role of the messages that chats are answered with"),
    ("--logprobs-mode", ("raw_logprobs", "processed_logprobs"), "raw_logprobs",
     "what HTTP requests that do not say get in OpenAI's field: raw_logprobs (the model's own) or "
     "processed_logprobs (of the distribution sampled from, as TRL wants them)"),
    ("--enable-return-routed-experts", "", False,
     "of a mixture: bring the experts of each token with every completion, chat and "
     "/inference/v1/generate, as vLLM's servers do that were told so"),
    ("--return-sampling-mask", "", False,
     "bring with them which tokens top_p, top_k and min_p left to draw from"),
    ("--tool-call-parser", "NAME", None,
     "how this model writes calls of tools, for chats that offer some: hermes (Hermes, Qwen2.5, "
     "Qwen3), openai (gpt-oss), qwen3_coder, qwen3_xml, llama3_json, llama4_json, "
     "llama4_pythonic, pythonic (Llama 3.2), mistral, deepseek_v3, deepseek_v31, deepseek_v32, "
     "glm45, glm47, kimi_k2, minimax_m2, granite, granite4, nemotron_json or olmo3"),
    ("--reasoning-parser", "NAME", None,
     "how it marks what it thinks before it answers, which chats then tell apart: qwen3 (also "
     "named deepseek_v3, glm45, glm47, kimi_k2, minimax_m2, olmo3), deepseek_r1, mistral or "
     "openai_gptoss"),
    ("--follow", "DIR", None,
     "update from the checkpoints and versions that appear in DIR, under a --weight-dir; a fleet's "
     "front reads them for all"),
    ("--shutdown-timeout", "X", None,
     "seconds that requests which run have to end after SIGTERM, while no new ones are taken; a "
     "second signal ends it at once (default: 0; 10 for a member of a fleet, whose requests go on "
     "at other members then)"),
    ("--exit-with-stdin", "", False,
     "end when standard input closes, so when the parent process does"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Up:
    """A service that is ready: where it listens, and what ends it with a failure, if anything."""

    http: str
    grpc: str
    backend: Backend
    memory: str = ""
    died: asyncio.Future[WorkerDied] | None = None


def listening_of(args: argparse.Namespace) -> Listening:
    """Raises ``ConfigError`` for flags that do not go together."""
    from rollout.server.auth import Tokens
    from rollout.server.service import Listening

    if (args.shutdown_timeout or 0.0) < 0 or not math.isfinite(args.shutdown_timeout or 0.0):
        raise ConfigError("--shutdown-timeout must be a number of seconds, 0 or more")
    for name in ("port", "grpc_port", "open_port"):
        if not 0 <= (getattr(args, name) or 0) < 1 << 16:
            raise ConfigError(f"--{name.replace('_', '-')} must be 0..65535")
    control = args.control_token if args.control_token is not None else environment("CONTROL_TOKEN")
    return Listening(
        host=args.host, port=args.port, grpc_port=args.grpc_port,
        tokens=Tokens(generation=token_of(args), control=control), tls=_server_tls(args),
        insecure=args.insecure, open_routes=_open_routes(args), answers=_answers(args),
        max_body_bytes=args.max_body_bytes, root_path=args.root_path,
        adapters=_adapters(args.lora_modules),
    )  # fmt: skip


def add_listening(parser: argparse.ArgumentParser, *more: Row) -> None:
    """The flags of what serves; ``more`` of one kind of it."""
    group = parser.add_argument_group("listening")
    add_rows(group, (*LISTENING, *more))
    group.add_argument(
        "--lora-modules", nargs="+", action="extend", default=[], metavar="NAME=PATH",
        help="adapters (PEFT directories) to load before anything is served; they take slots of "
        "--max-adapters",
    )  # fmt: skip


def check_slots(at: Listening, config: EngineConfig) -> None:
    """Raises ``ConfigError`` where adapters to begin with have no slots."""
    if len(at.adapters) > config.max_adapters:
        raise ConfigError(
            f"--lora-modules names {len(at.adapters)} adapters, and --max-adapters "
            f"{config.max_adapters} has slots for no more: raise it"
        )


async def run_service(args: argparse.Namespace, service: AbstractAsyncContextManager[Up]) -> int:
    """Serve until SIGINT or SIGTERM; prints one line ``ready http=... grpc=...`` on stdout.

    After SIGTERM requests that run have ``--shutdown-timeout`` to end; any other signal, or end of
    input, is the end at once.

    Status 0 once it was ready, 1 when it ``died``; a signal before that ends it with 128 + the
    signal's number.
    """
    stop, ready, at_once = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        if signals or number == signal.SIGINT:
            at_once.set()
        signals.append(number)
        stop.set()

    def on_end_of_input() -> None:
        at_once.set()
        stop.set()

    def heed() -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal, number)

    heed()
    if args.exit_with_stdin:
        _when_input_ends(loop, on_end_of_input)

    async def run() -> int:
        line_to = sys.stdout  # nobody else's
        with contextlib.redirect_stdout(sys.stderr), contextlib.ExitStack() as last:
            last.callback(_leave_ray)
            async with service as up:
                if up.memory:
                    print(f"memory {up.memory}", file=sys.stderr, flush=True)
                settle()
                heed()  # again: Ray ends the process at SIGTERM once it is connected
                print(f"ready http={up.http} grpc={up.grpc}", file=line_to, flush=True)
                ready.set()
                status = await _until(stop, up.died)
                if not status:
                    await _leave(up.backend, args.shutdown_timeout, at_once)
                return status

    # Starting can take minutes: a signal must end it too.
    running, stopped = asyncio.create_task(run()), asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if ready.is_set() or running.done():
        return await running  # it ends by itself, in order
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, RolloutError):
        await running
    # Ranks and servers are gone. Python would wait for the thread that loads, which nothing can
    # interrupt in the middle of a download or an import.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signals[0] if signals else 0)


def _adapters(given: Sequence[str]) -> dict[str, str]:
    """By name; raises ``ConfigError``."""
    found: dict[str, str] = {}
    for each in given:
        name, _, path = each.partition("=")
        if not name or not path:
            raise ConfigError(f"--lora-modules takes NAME=PATH, not {each!r}")
        if name in found:
            raise ConfigError(f"--lora-modules {name} is given twice")
        found[name] = path
    return found


def _open_routes(args: argparse.Namespace) -> OpenRoutes | None:
    from rollout.server.http.open_routes import OpenRoutes

    if (args.open_routes is None) != (args.open_port is None):
        raise ConfigError("--open-routes and --open-port go together: what is open, and where")
    if args.open_routes is None:
        if args.open_host != LOOPBACK:
            raise ConfigError("--open-host goes with --open-routes and --open-port")
        return None
    routes = tuple(route.strip() for route in args.open_routes.split(","))
    return OpenRoutes(routes=routes, host=args.open_host, port=args.open_port)


def _answers(args: argparse.Namespace) -> AnswerDefaults:
    from rollout.server.http.openai.answer_defaults import AnswerDefaults

    return AnswerDefaults(
        logprobs_mode=args.logprobs_mode,
        tool_call_parser=args.tool_call_parser,
        reasoning_parser=args.reasoning_parser,
        routed_experts=args.enable_return_routed_experts,
        sampling_mask=args.return_sampling_mask,
        response_role=args.response_role,
    )


def _server_tls(args: argparse.Namespace) -> ServerTls | None:
    if args.tls_cert is None or args.tls_key is None:
        if args.tls_cert or args.tls_key or args.tls_client_ca:
            raise ConfigError("TLS needs both --tls-cert and --tls-key")
        return None
    return ServerTls(cert=args.tls_cert, key=args.tls_key, client_ca=args.tls_client_ca)


async def _until(stop: asyncio.Event, died: asyncio.Future[WorkerDied] | None) -> int:
    """Wait for the end; returns the exit status."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([one for one in (stopping, died) if one], return_when="FIRST_COMPLETED")
    if not stopping.done():
        log.error("ending in %g s with status %d (--on-death exit)", _DEATH_WAIT, RANK_DIED)
        await asyncio.wait((stopping,), timeout=_DEATH_WAIT)
    stopping.cancel()
    return RANK_DIED if died is not None and died.done() else 0


def _leave_ray() -> None:
    """Where this process is connected to a cluster: until it is not, Ray prints to standard output
    what happens there.
    """
    if (ray := sys.modules.get("ray")) is not None:
        ray.shutdown()


async def _leave(backend: Backend, timeout: float | None, at_once: asyncio.Event) -> None:
    """Take nothing new, and return once nothing runs and no fleet counts on it any more; what has
    not ended after ``timeout`` seconds is ended: a fleet's front goes on with it elsewhere.
    """
    if timeout is None:
        timeout = MEMBER_TIMEOUT if backend.is_member else 0.0
    backend.leave()
    if not timeout:
        return

    async def wait(seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not (at_once.is_set() or backend.has_left):
                    await asyncio.sleep(_LOOK)

    log.info("no new requests are taken; those that run have %g s to end", timeout)
    await wait(timeout)
    if not (at_once.is_set() or backend.has_left):
        backend.end_calls(EngineClosed("the service was stopped while the call ran"))
        await wait(LAST_WORD)


def _when_input_ends(loop: asyncio.AbstractEventLoop, tell: Callable[[], None]) -> None:
    """``tell`` when stdin ends; a thread, because not every kind of file can be polled."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(tell)

    threading.Thread(target=wait, name="stdin", daemon=True).start()
