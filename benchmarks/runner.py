"""What every runner here shares: its arguments, its loop over workloads, and the lines it prints.

Once, it runs each workload and prints a JSON line for it. With `--turns` it stays up instead: it
prints a line when it is ready and then runs the workloads once per seed read from its input, so
that `side_by_side.py` can let two engines take turns without starting them again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from workloads import Request, parse_names, requests

START = time.perf_counter()

# Seconds of one greedy call: the requests, and how many tokens each makes in place of its own.
Generate = Callable[[Sequence[Request], int | None], float]


def parser(doc: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("checkpoint")
    made.add_argument("workloads", type=parse_names)
    made.add_argument("--seed", type=int, default=None, help="default: the time")
    made.add_argument("--dtype", default="bfloat16")
    made.add_argument("--new-tokens", type=int, default=None, help="at most so many a sequence")
    made.add_argument("--turns", action="store_true", help="a turn for each seed of the input")
    return made


def run(
    engine: str, args: argparse.Namespace, start: Callable[[], AbstractContextManager[Generate]]
) -> None:
    """Start the engine, warm it up with its first tokens, and take one turn or many."""
    with start() as generate:
        generate(requests("W1", 0), 1)
        ready = time.perf_counter() - START
        generate(requests("W1", 1), 4)  # warm-up
        if not args.turns:
            turn(engine, args, generate, int(time.time()) if args.seed is None else args.seed)
            return
        print(json.dumps({"engine": engine, "first_token_after_start_s": ready}), flush=True)
        for line in sys.stdin:
            turn(engine, args, generate, int(line))
            print(json.dumps({"engine": engine, "turn": int(line)}), flush=True)


def turn(engine: str, args: argparse.Namespace, generate: Generate, seed: int) -> None:
    """Each workload once. `first_token_s` is a whole call that asks for one token per sample."""
    for name in args.workloads:
        batch = requests(name, seed)
        if args.new_tokens is not None:
            batch = [replace(r, new_tokens=min(r.new_tokens, args.new_tokens)) for r in batch]
        first = generate(batch, 1)
        seconds = generate(batch, None)
        tokens = sum(r.new_tokens for r in batch)
        line = {
            "engine": engine,
            "checkpoint": args.checkpoint,
            "workload": name,
            "sequences": len(batch),
            "new_tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "first_token_s": first,
        }
        print(json.dumps(line), flush=True)
