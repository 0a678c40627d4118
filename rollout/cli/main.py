"""The command line: ``rollout serve | fleet | generate | bench | check ...``; ``HELP`` has all.

A mistake of the user is one line on stderr, ``rollout: <Error>: <what and what to do>``, and exit
status 2; nothing is left running.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import rollout
from rollout.cli.bench import add_bench
from rollout.cli.client import SERVICE, add_client_flags, connect
from rollout.cli.diagnose import add_diagnose
from rollout.cli.flags import (
    Parser,
    Row,
    add_engine_flags,
    add_model,
    add_model_flag,
    add_rows,
    add_sampling_flags,
    engine_config,
    model_of,
    refuse,
    refuse_engine_flags,
    sampling_params,
)
from rollout.cli.fleet import add_fleet
from rollout.cli.logs import LEVELS, configure_logging
from rollout.cli.plan import add_plan
from rollout.cli.replay import add_replay
from rollout.cli.serve import add_serve
from rollout.cli.tables import print_table
from rollout.cli.top import add_top
from rollout.errors import ConfigError, RolloutError
from rollout.wire.codec import to_plain

if TYPE_CHECKING:
    from rollout.weight_sync.protocol.receipts import UpdateReceipt

USER_ERROR, INTERRUPTED = 2, 130


HELP = {  # of each command: what it takes, and an example
    "serve": ("MODEL", "runs/model --tensor-parallel-size 2 --port 8000 --grpc-port 50051"),
    "fleet": (
        "--engine HOST:PORT... | MODEL --ray [ADDRESS] | --coordinator HOST:PORT",
        "--engine 10.0.0.1:50051 --engine 10.0.0.2:50051",
    ),
    "generate": (
        "MODEL PROMPT... | --connect HOST:PORT PROMPT...",
        "runs/model 'Once upon a time'",
    ),
    "check": ("MODEL | --against DIR HOST:PORT", "--against runs/step-7 127.0.0.1:50051"),
    "info": ("HOST:PORT", "127.0.0.1:50051"),
    "top": ("HOST:PORT", "127.0.0.1:50051"),
    "bench": ("MODEL", "runs/model --sequences 32 --prompt-tokens 128 --new-tokens 128"),
    "diagnose": ("HOST:PORT --model CHECKPOINT", "127.0.0.1:50051 --model runs/step-7"),
    "replay": ("ID --journal DIR", "cmpl-7 --journal runs/journal --checkpoint runs/step-7"),
    "plan": (
        "--model MODEL --trainer KIND:N --rollout tp:NxE",
        "--model runs/model --trainer fsdp:64 --rollout tp:8x8",
    ),
}
GENERATE: tuple[Row, ...] = (
    ("--connect", "HOST:PORT", None, "use the service at this gRPC address, not MODEL"),
    ("--json", "", False, "one JSON object per sample"),
)
CHECK: tuple[Row, ...] = (
    ("--against", "DIR", None, "instead: whether the service at HOST:PORT holds the weights of "
     "this checkpoint; exit status 1 if they differ"),
    ("--print-shapes", "", False, "also every parameter of every rank: its shape, and of which "
     "tensors it has which part"),
    ("--all", "", False, "with --against: name all tensors that differ, not the first 8"),
)  # fmt: skip
SHOWN = 8  # tensors that differ
INFO: tuple[Row, ...] = (
    ("--json", "", False, "one JSON object"),
    ("--receipts", "N", 4, "show those of the last N commits"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        args = make_parser().parse_known(argv)
        configure_logging(args.log_level)
        return int(args.run(args) or 0)
    except RolloutError as error:
        message = " ".join(str(error).split())
        print(f"rollout: {type(error).__name__}: {message}", file=sys.stderr, flush=True)
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
        epilog="Tokens and a client's TLS files may also come from ROLLOUT_TOKEN, "
        "ROLLOUT_CONTROL_TOKEN, ROLLOUT_TLS_CA, ROLLOUT_TLS_CERT and ROLLOUT_TLS_KEY. Most flags "
        "may be spelled as vLLM or SGLang have them.",
    )
    parser.add_argument("--version", action="version", version=f"rollout {rollout.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_serve(commands, _add_command)
    add_fleet(commands, _add_command)
    _add_generate(commands)
    _add_check(commands)
    _add_info(commands)
    add_top(commands, _add_command)
    add_bench(commands, _add_command)
    add_plan(commands, _add_command)
    add_replay(commands, _add_command)
    add_diagnose(commands, _add_command)
    return parser


def _add_command(commands: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    usage, example = HELP[name]
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        usage=f"rollout {name} {usage} [options]",
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example: rollout {name} {example}",
    )
    parser.set_defaults(run=run, parser=parser)
    add_rows(parser, [("--log-level", tuple(LEVELS), "warning", "what is logged on stderr")])
    return parser


# ---- generate ----


def _add_generate(commands: Any) -> None:
    parser = _add_command(commands, "generate", generate, "continue prompts, here or on a service")
    parser.add_argument(
        "words", nargs="*", metavar="MODEL PROMPT",
        help="MODEL (a checkpoint directory, hub id or URL), then the prompts",
    )  # fmt: skip
    add_model_flag(parser)
    parser.add_argument(
        "--token-ids", action="append", default=[], metavar="1,2,3",
        help="a prompt as token ids; may be repeated",
    )  # fmt: skip
    add_rows(parser, GENERATE)
    add_client_flags(parser)
    add_sampling_flags(parser)
    add_engine_flags(parser)


def generate(args: argparse.Namespace) -> int:
    words = list(args.words)
    model = args.model_flag
    if args.connect is not None:
        refuse_engine_flags(args, "--connect")
    else:
        refuse(args, SERVICE, "of a service: give its address as --connect HOST:PORT")
        if model is None:
            if not words:
                raise ConfigError("generate needs MODEL, or --connect HOST:PORT")
            model = words.pop(0)
    prompts = [*words, *map(_parse_ids, args.token_ids)]
    if not prompts:
        taken = "" if model is None else f", behind the model, for which {model!r} is taken"
        raise ConfigError(f"generate needs a prompt: a text, or --token-ids 1,2,3{taken}")
    for word in filter(os.path.isdir, words):
        taken = "a prompt (no MODEL is read beside --connect)" if model is None else "a prompt"
        print(f"rollout: warning: the directory {word!r} is taken as {taken}", file=sys.stderr)
    params = sampling_params(args)
    if model is None:
        engine = connect(args, args.connect)
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
            "logprobs": [p if isfinite(p) else None for p in completion.logprobs.raw],
            "finish_reason": completion.finish_reason,
            "epoch": output.epoch,
            "weight_versions": [[s.version, s.start, s.stop] for s in completion.weight_versions],
            "staleness": completion.staleness,
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
    add_model(parser)
    add_rows(parser, CHECK)
    add_client_flags(parser)
    add_engine_flags(parser)


def check(args: argparse.Namespace) -> int:
    """Also tells differing weights from differing kernels; status 1 when weights differ."""
    if args.against is not None:
        return _check_against(args)
    if args.all:
        raise ConfigError("--all goes with --against DIR: it names tensors that differ")
    refuse(args, SERVICE, "of a service, whose weights --against DIR compares")
    from rollout.server.preflight import check as preflight

    found = preflight(
        engine_config(args, model=model_of(args)),
        lambda known: print("\n".join(known.lines()), flush=True),
    )
    print("\n".join(found.machine_lines()))
    if args.print_shapes:
        print("\n".join(found.shape_lines()))
    return 0


def _check_against(args: argparse.Namespace) -> int:
    refuse_engine_flags(args, "--against")
    if args.print_shapes:
        raise ConfigError("--print-shapes is of a MODEL that is checked here, not of --against")
    if args.model is None or args.model_flag is not None:
        raise ConfigError(
            f"check --against {args.against} needs the gRPC address of a service, and no model: "
            f"rollout check --against {args.against} HOST:PORT"
        )
    with connect(args, args.model) as engine:
        report = engine.check_weights(args.against)
        cost = None if report.equal else engine.preflight(args.against).cost
    live = f"version {report.version} of epoch {report.epoch}, {report.num_tensors} tensors"
    if report.equal:
        print(f"weights equal: kernels differ, where logprobs do ({live})")
        return 0
    print(f"weights differ: {len(report.differing) + len(report.problems)} tensors ({live})")
    named = (*report.problems, *report.differing)
    shown = len(named) if args.all else SHOWN
    for line in named[:shown]:
        print(f"  {line}")
    if len(named) > shown:
        print(f"  and {len(named) - shown} more; --all names them")
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
    add_rows(parser, INFO)
    add_client_flags(parser)


def info(args: argparse.Namespace) -> int:
    with connect(args, args.address, timeout=10.0) as engine:
        server, stats, weights = engine.server_info(), engine.metrics(), engine.weight_info()
        receipts = engine.receipts()[-args.receipts :] if args.receipts > 0 else ()
    facts = {
        "model": server.model,
        "task": server.task or "generate",
        "state": stats.state,
        "version": weights.version,
        "epoch": weights.epoch,
        "label": weights.label,
        "update state": weights.state,
        "last update": weights.last_update_id or None,
        "adapters": dict(stats.adapters),
        "max adapters": weights.max_adapters,
        "members": dict(stats.members),
        "fleet": stats.fleet or None,
        "fencing epoch": weights.fence or None,
        "serving lease s": None if stats.serving_lease is None else round(stats.serving_lease, 1),
        "ranks": weights.num_ranks,
        "device": weights.device,
        "undo": weights.undo,
        "memory": dict(weights.memory),
        "dtype": str(weights.dtype).removeprefix("torch."),
        "kv cache dtype": weights.numerics.get("kv_cache_dtype"),
        "max model len": server.max_model_len,
        "tokenizer": server.has_tokenizer,
        "running": stats.running,
        "waiting": stats.waiting,
        "seed": stats.seed,
        "kv usage": round(stats.kv_usage, 4),
        "tokens generated": stats.generation_tokens_total,
        "updates": stats.weight_updates_total,
        "updates failed": stats.weight_updates_failed_total,
        "last stall s": stats.last_stall_seconds,
        "following": stats.following or None,
        "follow error": stats.follow_error or None,
        "package": server.package_version,
    }
    if args.json:
        told = {name.replace(" ", "_"): value for name, value in facts.items()}
        print(json.dumps({**told, "receipts": [to_plain(r) for r in receipts]}))
        return 0
    facts["memory"] = ", ".join(f"{k} {v / 2**20:.1f} MiB" for k, v in weights.memory.items())
    facts["adapters"] = ", ".join(f"{k} v{v}" for k, v in stats.adapters.items()) or None
    alone = "one engine" if stats.serving_lease is None else "it is a member of a fleet"
    facts["members"] = ", ".join(f"{k} {v}" for k, v in stats.members.items()) or f"none: {alone}"
    rows = [(name, "-" if value is None else value) for name, value in facts.items()]
    print_table([*rows, *(("receipt", _receipt_line(receipt)) for receipt in receipts)])
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
