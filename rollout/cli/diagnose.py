"""``rollout diagnose``: why a service's logprobs are not those of a checkpoint in transformers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from rollout.cli.client import add_client_flags, connect
from rollout.cli.flags import Row, add_rows
from rollout.errors import ConfigError

DIAGNOSE: tuple[Row, ...] = (
    ("--model", "CHECKPOINT", None, "the trainer's weights, as transformers reads them"),
    ("--checkpoint", "DIR", None,
     "with the config.json that the service runs by, where --model has another (default: --model)"),
    ("--sequences", "N", 4, "samples that both stacks score"),
    ("--tokens", "N", 32, "tokens of each"),
    ("--temperature", "X", 1.0, "that samples are drawn at"),
    ("--top-p", "X", 1.0, "that samples are drawn with"),
    ("--trainer-temperature", "X", None,
     "that the trainer divides its logits by (default: --temperature)"),
    ("--head-dtype", ("auto", "float32"), "auto", "of the service's head, as it was started"),
)  # fmt: skip


def add_diagnose(commands: Any, add_command: Callable[..., argparse.ArgumentParser]) -> None:
    parser = add_command(
        commands, "diagnose", run, "name the first place where a service and a checkpoint differ"
    )
    parser.add_argument("address", metavar="HOST:PORT", help="gRPC address of the service")
    add_rows(parser, DIAGNOSE)
    add_client_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Status 0 where nothing differs beyond rounding, else 1."""
    if args.model is None:
        raise ConfigError("diagnose needs the trainer's weights: --model CHECKPOINT")
    from rollout.api.diagnosing.diagnosis import diagnose
    from rollout.generation import SamplingParams

    params = SamplingParams(
        max_tokens=args.tokens, temperature=args.temperature, top_p=args.top_p, ignore_eos=True
    )
    with connect(args, args.address) as engine:
        found = diagnose(
            engine,
            args.model,
            checkpoint=args.checkpoint,
            params=params,
            trainer_temperature=args.trainer_temperature,
            sequences=args.sequences,
            head_dtype=args.head_dtype,
        )
    for line in found.lines():
        print(line)
    return 0 if found.verdict is None else 1
