"""The command line: ``rollout serve | generate | bench | plan | check | info``.

A mistake of the user is one line on stderr, ``rollout: <Error>: <what and what to do>``, and exit
status 2; nothing is left running.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

import rollout
from rollout.cli_bench import add_bench
from rollout.cli_flags import (
    Parser,
    add_engine_flags,
    add_sampling_flags,
    engine_config,
    sampling_params,
)
from rollout.cli_plan import add_plan
from rollout.errors import ConfigError, RolloutError
from rollout.observability import LEVELS, configure_logging
from rollout.tls import ServerTls
from rollout.update_wire import receipt_to_wire

if TYPE_CHECKING:
    from rollout.server.auth import Tokens
    from rollout.weights import UpdateReceipt

USER_ERROR, INTERRUPTED = 2, 130
_FOLLOW_WAIT = 5.0  # seconds for an update that is under way when the service ends


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        args = make_parser().parse_known(argv)
        configure_logging(args.log_level)
        return int(args.run(args) or 0)
    except RolloutError as error:
        name = "ValueError" if isinstance(error, ValueError) else type(error).__name__
        message = " ".join(str(error).split())
        print(f"rollout: {name}: {message}", file=sys.stderr, flush=True)
        return USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED


def make_parser() -> Parser:
    parser = Parser(
        prog="rollout",
        description="A generation engine whose weights are a transaction.",
        epilog="Tokens may also come from ROLLOUT_TOKEN and ROLLOUT_CONTROL_TOKEN.",
    )
    parser.add_argument("--version", action="version", version=f"rollout {rollout.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_generate(commands)
    _add_check(commands)
    _add_info(commands)
    add_bench(commands, _add_command)
    add_plan(commands, _add_command)
    return parser


def _add_command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + "."
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--log-level", choices=LEVELS, default="warning", help="of the log on stderr"
    )
    return parser


# ---- serve ----


def _add_serve(commands: Any) -> None:
    parser = _add_command(commands, "serve", serve, "serve a model over HTTP and gRPC")
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory or hub id")
    group = parser.add_argument_group("listening")
    group.add_argument("--host", default="127.0.0.1", help="address (default: loopback)")
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="of HTTP; 0 picks a free one (8000)"
    )
    group.add_argument(
        "--grpc-port", type=int, default=50051, metavar="N",
        help="of gRPC; 0 picks a free one (50051)",
    )  # fmt: skip
    _add_token(group, "bearer token that clients must send")
    group.add_argument(
        "--control-token", metavar="TOKEN",
        help="token for weights and control (default: --token allows them too)",
    )  # fmt: skip
    group.add_argument(
        "--tls-cert", metavar="PEM", help="certificate of both servers, HTTP and gRPC"
    )
    group.add_argument("--tls-key", metavar="PEM", help="its key")
    group.add_argument(
        "--tls-client-ca", metavar="PEM",
        help="let in only clients with a certificate of this authority, at either door",
    )  # fmt: skip
    group.add_argument(
        "--logprobs-mode", default="raw_logprobs", metavar="MODE",
        choices=("raw_logprobs", "processed_logprobs"),
        help="what HTTP requests that do not say get in OpenAI's field: raw_logprobs (the model's "
        "own) or processed_logprobs (of the distribution sampled from, as TRL wants them)",
    )  # fmt: skip
    group.add_argument(
        "--exit-with-stdin", action="store_true",
        help="end when standard input closes, so when the parent process does",
    )  # fmt: skip
    parser.add_argument(
        "--follow", metavar="DIR",
        help="update from the checkpoints and versions that appear in DIR, under a --weight-dir",
    )  # fmt: skip
    add_engine_flags(parser)


def serve(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM; prints one line ``ready http=... grpc=...`` on stdout.

    Status 0 once it was ready; a signal before that ends it with 128 + the signal's number.
    """
    from rollout.server.auth import Tokens

    for name in ("port", "grpc_port"):
        if not 0 <= getattr(args, name) < 1 << 16:
            raise ConfigError(f"--{name.replace('_', '-')} must be 0..65535")
    config = engine_config(args, model=args.model, progress=sys.stderr.isatty())
    tokens = Tokens(
        generation=_token(args), control=args.control_token or _environment("CONTROL_TOKEN")
    )
    if (args.tls_cert is None) != (args.tls_key is None) or (
        args.tls_client_ca is not None and args.tls_cert is None
    ):
        raise ConfigError("--tls-cert and --tls-key go together, --tls-client-ca with them")
    if args.tls_cert is not None and args.follow is not None:
        raise ConfigError("--follow reaches the service without TLS: give one or the other")
    if args.follow is not None:
        from rollout.weight_sync.follower import allowed

        allowed(args.follow, config.weight_dirs)
    return asyncio.run(_serve(args, config, tokens))


def _server_tls(args: argparse.Namespace) -> ServerTls | None:
    if args.tls_cert is None:
        return None
    return ServerTls(cert=args.tls_cert, key=args.tls_key, client_ca=args.tls_client_ca)


async def _serve(args: argparse.Namespace, config: Any, tokens: Tokens) -> int:
    from rollout.server.service import serving

    stop, ready = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    signals: list[int] = []

    def on_signal(number: int) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    if args.exit_with_stdin:
        _on_end_of_input(loop, stop)

    async def run() -> None:
        async with serving(
            config, host=args.host, port=args.port, grpc_port=args.grpc_port, tokens=tokens,
            tls=_server_tls(args), logprobs_mode=args.logprobs_mode,
        ) as at:  # fmt: skip
            print(f"memory {at.memory}", file=sys.stderr, flush=True)
            print(f"ready http={at.http} grpc={at.grpc}", flush=True)
            ready.set()
            async with _following(args.follow, config, at.grpc, tokens):
                await stop.wait()

    # Starting can take minutes: a signal must end it too.
    running, stopped = asyncio.create_task(run()), asyncio.create_task(stop.wait())
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if ready.is_set() or running.done():
        await running  # it ends by itself, in order
        return 0
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError, RolloutError):
        await running
    # Ranks and servers are gone. Python would wait for the thread that loads, which nothing can
    # interrupt in the middle of a download or an import.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(128 + signals[0] if signals else 0)


@contextlib.asynccontextmanager
async def _following(
    directory: str | None, config: Any, address: str, tokens: Tokens
) -> AsyncIterator[None]:
    """Updates from ``directory`` go through the service's own gRPC, from a thread."""
    if directory is None:
        yield
        return
    from rollout.grpc_client import RolloutClient
    from rollout.weight_sync.follower import Follower

    client = RolloutClient(address, tokens.control or tokens.generation, config.timeout)
    follower = Follower(directory, config.weight_dirs, lambda: client, timeout=config.timeout)
    ended = threading.Event()
    thread = threading.Thread(target=follower.run, args=(ended,), name="follow", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        client.close()  # an update under way ends now, and changes nothing
        await asyncio.to_thread(thread.join, _FOLLOW_WAIT)
        client.close()


def _on_end_of_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    """Set ``stop`` when stdin ends; a thread, because not every kind of file can be polled."""

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        with contextlib.suppress(RuntimeError):  # the loop has ended by itself
            loop.call_soon_threadsafe(stop.set)

    threading.Thread(target=wait, name="stdin", daemon=True).start()


# ---- generate ----


def _add_generate(commands: Any) -> None:
    parser = _add_command(commands, "generate", generate, "continue prompts, here or on a service")
    parser.usage = "rollout generate MODEL PROMPT... | --connect HOST:PORT PROMPT... [options]"
    parser.add_argument("words", nargs="*", metavar="MODEL PROMPT", help="MODEL, then the prompts")
    parser.add_argument("--connect", metavar="HOST:PORT", help="gRPC address of a service")
    parser.add_argument(
        "--token-ids", action="append", default=[], metavar="1,2,3",
        help="a prompt as token ids; may be repeated",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object per sample")
    _add_token(parser, "bearer token of the service")
    add_sampling_flags(parser)
    add_engine_flags(parser)


def generate(args: argparse.Namespace) -> int:
    words = list(args.words)
    if args.connect is None and not words:
        raise ConfigError("generate needs MODEL, or --connect HOST:PORT")
    model = words.pop(0) if args.connect is None else None
    prompts = [*words, *map(_parse_ids, args.token_ids)]
    if not prompts:
        raise ConfigError("generate needs a prompt: a text, or --token-ids 1,2,3")
    params = sampling_params(args)
    if model is None:
        engine = rollout.Rollout.connect(args.connect, _token(args))
    else:
        engine = rollout.Rollout(**engine_config(args, model=model).to_dict())
    with engine:
        for output in engine.generate(prompts, params):
            for completion in output.outputs:
                print(_shown(output, completion, args.json), flush=True)
    return 0


def _shown(output: Any, completion: Any, as_json: bool) -> str:
    if not as_json:
        text: str = completion.text
        return text or " ".join(map(str, completion.token_ids))
    return json.dumps(
        {
            "prompt": output.prompt,
            "prompt_token_ids": output.prompt_token_ids,
            "index": completion.index,
            "text": completion.text,
            "token_ids": completion.token_ids,
            "logprobs": completion.logprobs.raw,
            "finish_reason": completion.finish_reason,
            "weight_versions": [[s.version, s.start, s.stop] for s in completion.weight_versions],
        }
    )


def _parse_ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"--token-ids must be integers like 1,2,3, got {text!r}") from None


# ---- check and info ----


def _add_check(commands: Any) -> None:
    parser = _add_command(
        commands, "check", check, "say whether a model can be served here, without its weights"
    )
    parser.usage = "rollout check MODEL [options] | --against DIR HOST:PORT"
    parser.add_argument("model", metavar="MODEL", help="checkpoint directory or hub id")
    parser.add_argument(
        "--against", metavar="DIR",
        help="instead: whether the service at HOST:PORT holds the weights of this checkpoint",
    )  # fmt: skip
    _add_token(parser, "bearer token of the service, with --against")
    add_engine_flags(parser)


def check(args: argparse.Namespace) -> int:
    """Also tells differing weights from differing kernels; status 1 when weights differ."""
    if args.against is not None:
        return _check_against(args)
    from rollout.server.preflight import check as preflight

    for line in preflight(engine_config(args, model=args.model)).lines():
        print(line)
    return 0


def _check_against(args: argparse.Namespace) -> int:
    with rollout.Rollout.connect(args.model, _token(args)) as engine:
        report = engine.check_weights(args.against)
        cost = None if report.equal else engine.preflight(args.against).cost
    live = f"version {report.version} of epoch {report.epoch}, {report.num_tensors} tensors"
    if report.equal:
        print(f"weights equal: kernels differ, where logprobs do ({live})")
        return 0
    print(f"weights differ: {len(report.differing) + len(report.problems)} tensors ({live})")
    for line in (*report.differing, *report.problems):
        print(f"  {line}")
    if cost is not None:
        print(
            f"an update to them: about {cost.seconds:.2f} s ({cost.basis}); at most "
            f"{cost.sender_bytes / 2**20:.1f} MiB more on the sender, "
            f"{cost.rank_bytes / 2**20:.1f} MiB on each rank"
        )
    return 1


def _add_info(commands: Any) -> None:
    parser = _add_command(commands, "info", info, "what a running service is and does")
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address of the service")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--receipts", type=int, default=4, metavar="N", help="of the last N commits (default: 4)"
    )
    _add_token(parser, "bearer token of the service")


def info(args: argparse.Namespace) -> int:
    with rollout.Rollout.connect(args.address, _token(args), timeout=10.0) as engine:
        server, stats, weights = engine.server_info(), engine.metrics(), engine.weight_info()
        receipts = engine.receipts()[-args.receipts :] if args.receipts > 0 else ()
    facts = {
        "model": server.model,
        "state": stats.state,
        "version": weights.version,
        "epoch": weights.epoch,
        "label": weights.label,
        "update state": weights.state,
        "last update": weights.last_update_id or None,
        "ranks": weights.tensor_parallel_size,
        "device": weights.device,
        "undo": weights.undo,
        "memory": dict(weights.memory),
        "dtype": str(weights.dtype).removeprefix("torch."),
        "max model len": server.max_model_len,
        "tokenizer": server.has_tokenizer,
        "running": stats.running,
        "waiting": stats.waiting,
        "kv usage": round(stats.kv_usage, 4),
        "tokens generated": stats.generation_tokens_total,
        "updates": stats.weight_updates_total,
        "updates failed": stats.weight_updates_failed_total,
        "last stall s": stats.last_stall_seconds,
        "package": server.package_version,
    }
    if args.json:
        told = {name.replace(" ", "_"): value for name, value in facts.items()}
        print(json.dumps({**told, "receipts": [receipt_to_wire(r) for r in receipts]}))
        return 0
    facts["memory"] = ", ".join(f"{k} {v / 2**20:.1f} MiB" for k, v in weights.memory.items())
    for name, value in facts.items():
        print(f"{name:17} {'-' if value is None else value}")
    for receipt in receipts:
        print(f"{'receipt':17} {_receipt_line(receipt)}")
    return 0


def _receipt_line(receipt: UpdateReceipt) -> str:
    """One commit: the digest is the trainer's, and every rank voted that it holds just that."""
    times = receipt.timings
    label = f" {receipt.label!r}" if receipt.label else ""
    return (
        f"v{receipt.version}{label} digest {receipt.digest:016x} {receipt.num_tensors} tensors "
        f"{receipt.num_bytes} bytes ({receipt.wire_bytes} sent) by {receipt.transport} to "
        f"{len(receipt.ranks)} ranks, total {times.get('total', 0.0):.3f} s, "
        f"stall {times.get('stall', 0.0):.4f} s"
    )


# ---- helpers ----


def _add_token(parser: Any, text: str) -> None:
    parser.add_argument("--token", metavar="TOKEN", help=text)


def _token(args: argparse.Namespace) -> str | None:
    return args.token or _environment("TOKEN")


def _environment(name: str) -> str | None:
    """The one place where the command line reads the environment."""
    return os.environ.get(f"ROLLOUT_{name}") or None
