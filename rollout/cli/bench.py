"""``rollout bench``: tokens per second of made-up prompts and, on demand, where a step's time goes.

Prompts are random token ids; every sequence gets exactly ``--new-tokens``, or the run is refused.
The first round warms up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollout.cli.flags import Row, add_engine_flags, add_model, add_rows, engine_config, model_of
from rollout.cli.tables import print_table
from rollout.errors import ConfigError, DeadlineExceeded, EngineError
from rollout.generation import Request, SamplingParams

if TYPE_CHECKING:
    from rollout.engine.core import EngineCore

LENGTH = 64  # tokens of a prompt, and of what follows it, where they fit
WAIT = 3600.0  # seconds that one round may take
GB = 1e9
BENCH: tuple[Row, ...] = (
    ("--sequences", "N", 8, "sequences that run at the same time"),
    ("--prompt-tokens", "N", None, f"tokens of each prompt ({LENGTH}, or half of max_model_len)"),
    ("--new-tokens", "N", None, f"tokens each makes ({LENGTH}, or what max_model_len leaves)"),
    ("--rounds", "N", 3, "rounds that are measured, after one that warms up"),
    ("--temperature", "X", 1.0, "of sampling; 0 is greedy"),
    ("--profile", "", False, "then run one more round and say where each step's time went"),
    ("--json", "", False, "one JSON object"),
)


def add_bench(commands: Any, add_command: Any) -> None:
    """Register the command; ``add_command`` makes a subparser as the others have it."""
    parser = add_command(commands, "bench", run, "measure generation, and where its time goes")
    add_model(parser)
    add_rows(parser, BENCH)
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    from rollout.engine.core import EngineCore

    for name in ("sequences", "prompt_tokens", "new_tokens", "rounds"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more")
    core = EngineCore(engine_config(args, model=model_of(args)))
    core.start()
    try:
        fit(args, core.max_model_len)
        found = measure(core, args)
    finally:
        core.close()
    if args.json:
        print(json.dumps(found), flush=True)
    else:
        _print(found)
    return 0


def fit(args: argparse.Namespace, longest: int) -> None:
    """Choose the lengths that were not given; ``ConfigError`` where both do not fit together."""
    if args.prompt_tokens is None:
        args.prompt_tokens = max(1, min(LENGTH, longest // 2, longest - (args.new_tokens or 1)))
    if args.new_tokens is None:
        args.new_tokens = max(1, min(LENGTH, longest - args.prompt_tokens))
    if args.prompt_tokens + args.new_tokens > longest:
        raise ConfigError(
            f"--prompt-tokens {args.prompt_tokens} and --new-tokens {args.new_tokens} make "
            f"sequences of {args.prompt_tokens + args.new_tokens} tokens, but max_model_len is "
            f"{longest}: lower one of them"
        )


def measure(core: EngineCore, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one run, JSON-able; seconds, tokens a second, milliseconds of a step."""
    from rollout.engine.profile import EngineProfile

    turn = _Rounds(core, args)
    turn.run()
    rounds = [turn.run() for _ in range(args.rounds)]
    rank = core.rank_info[0]
    found: dict[str, Any] = {
        "model": core.config.model,
        "dtype": rank["dtype"],
        "device": rank["device"],
        "ranks": len(core.rank_info),
        "num_threads": core.config.resolved_num_threads,
        "sequences": args.sequences,
        "prompt_tokens": args.prompt_tokens,
        "new_tokens": args.new_tokens,
        "tokens_per_s": [tokens / seconds for tokens, seconds in rounds],
        "first_token_s": turn.first_token(),
    }
    if args.profile:
        timeout = core.config.timeout
        profile = EngineProfile(core)
        profile.start(timeout)
        turn.run()
        found["profile"] = summary(profile.stop(timeout))
    return found


class _Rounds:
    """Equal rounds of other prompts: no two share a prefix that the cache could find."""

    def __init__(self, core: EngineCore, args: argparse.Namespace) -> None:
        self._core, self._args, self._rng = core, args, random.Random(core.config.seed or 0)
        self._count = 0
        self._before = (0.0, 0)
        self._params = SamplingParams(
            temperature=args.temperature, max_tokens=args.new_tokens, ignore_eos=True
        )

    def run(self) -> tuple[int, float]:
        """Tokens made, and seconds from handing in all prompts to the last one's end."""
        from rollout.engine.requests.request_state import Snapshot

        args = self._args
        ids = self._core.model_config.text_ids
        self._before = self._waits()
        requests = []
        for _ in range(args.sequences):
            prompt = tuple(self._rng.choices(ids, k=args.prompt_tokens))
            self._count += 1
            name = f"bench-{self._count}"
            requests.append(Request(request_id=name, prompt_token_ids=prompt, params=self._params))
        done, failed, left, tokens = threading.Event(), [], len(requests), 0

        def sink(item: Any) -> None:
            nonlocal left, tokens
            left -= 1
            if isinstance(item, Snapshot):
                tokens += item.samples[0].count
            if isinstance(item, BaseException):
                failed.append(item)
            if failed or not left:
                done.set()

        started = time.perf_counter()
        self._core.submit(requests, sink, stream=False)
        if not done.wait(WAIT):
            raise DeadlineExceeded(f"a round of the bench did not end within {WAIT:g} s")
        if failed:
            raise failed[0]
        seconds = time.perf_counter() - started
        if tokens < args.sequences * args.new_tokens:
            raise EngineError(
                f"{tokens} of {args.sequences * args.new_tokens} tokens were made: samples ended "
                "early, as they do where the logits are NaN"
            )
        return tokens, seconds

    def first_token(self) -> float:
        """Mean seconds to a sequence's first token, in the last round."""
        (total, count), (before, counted) = self._waits(), self._before
        return (total - before) / (count - counted)

    def _waits(self) -> tuple[float, int]:
        waits = self._core.counters.time_to_first_token.snapshot()
        return waits.total, waits.count


# ---- the profile ----


def summary(profile: Mapping[str, Any]) -> dict[str, Any]:
    """An ``EngineProfile``'s figures as milliseconds of a mean step, and bytes a second.

    ``read_bytes_per_s`` is what all ranks together read when they do nothing else.
    """
    kinds = {
        kind: _kind_summary(engine, [rank[kind] for rank in profile["ranks"]])
        for kind, engine in profile["engine"].items()
    }
    return {"read_bytes_per_s": sum(profile["read"]), "kinds": kinds}


def _kind_summary(engine: Mapping[str, Any], ranks: list[Mapping[str, Any]]) -> dict[str, Any]:
    steps, first = engine["steps"], ranks[0]
    outside, inside = engine["seconds"], first["seconds"]
    forward = {k: v for k, v in inside.items() if k.startswith("step/forward")}
    sample = {k: v for k, v in inside.items() if k.startswith("step/sample")}
    text = {k: v for k, v in outside.items() if k.endswith("detokenise")}
    parts = {
        "schedule": outside["step/schedule"],
        "build": outside["step/build"],
        "to ranks and back": max(0.0, outside["step"] - sum(inside.values())),
        "forward": sum(forward.values()),
        "sample": sum(sample.values()),
        "rest of rank 0": inside["step"],
        "book": outside["step/book"],
        "detokenise": sum(text.values()),
        "publish": outside["publish"],
    }
    read = sum(rank["weight_bytes"] + rank["kv_bytes"] for rank in ranks)
    return {
        "steps": steps,
        "parts_ms": {name: 1e3 * seconds / steps for name, seconds in parts.items()},
        "ops": {
            "forward": _by_op(first, forward, "between ops"),
            "sample": _by_op(first, sample, "around ops"),
        },
        "weight_bytes": sum(rank["weight_bytes"] for rank in ranks) // steps,
        "kv_bytes": sum(rank["kv_bytes"] for rank in ranks) // steps,
        "read_bytes_per_s": read / parts["forward"],
    }


def _by_op(
    rank: Mapping[str, Any], spans: Mapping[str, float], rest: str
) -> dict[str, dict[str, float]]:
    """Own milliseconds and calls a step by the op's name, the longest first; ``rest``: no op."""
    found: dict[str, dict[str, float]] = {}
    for path, seconds in spans.items():
        depth = path.count("/")
        row = found.setdefault(path.rpartition("/")[2] if depth > 1 else rest, {"ms": 0.0})
        row["ms"] += 1e3 * seconds / rank["steps"]
        if depth > 1:
            row["calls"] = row.get("calls", 0.0) + rank["calls"][path] / rank["steps"]
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


# ---- for people ----


def _print(found: Mapping[str, Any]) -> None:
    speeds = sorted(found["tokens_per_s"])
    print(
        f"{found['model']}, {found['dtype']} on {found['device']}, {found['ranks']} rank(s) of "
        f"{found['num_threads']} thread(s)\n"
        f"{found['sequences']} sequences of {found['prompt_tokens']} + {found['new_tokens']} "
        f"tokens, {len(speeds)} round(s)\n"
        f"generation   {statistics.median(speeds):.1f} tokens/s ({speeds[0]:.1f} to "
        f"{speeds[-1]:.1f}), first token after {found['first_token_s']:.3f} s"
    )
    if "profile" not in found:
        return
    most = found["profile"]["read_bytes_per_s"]
    for kind, figures in sorted(found["profile"]["kinds"].items()):
        print()
        _print_kind(kind, figures, most)
    print(f"memory reads at {most / GB:.1f} GB/s where nothing else is done")


def _print_kind(kind: str, figures: Mapping[str, Any], most: float) -> None:
    whole = sum(figures["parts_ms"].values())

    def row(name: str, ms: float, calls: float | None = None) -> tuple[str, ...]:
        share = f"{100 * ms / whole:.1f}%"
        return name, f"{ms:.3f}", share, "" if calls is None else f"{calls:.1f}"

    rows = []
    for name, ms in figures["parts_ms"].items():
        ops = figures["ops"].get(name, {}).items()
        rows += [row(name, ms), *(row(f"  {op}", own["ms"], own.get("calls")) for op, own in ops)]
    head = f"{kind} step, mean of {figures['steps']}"
    print_table([*rows, row("step", whole)], head, "ms", "share", "calls")
    speed = figures["read_bytes_per_s"]
    print(
        f"forward reads {figures['weight_bytes'] / GB:.3f} GB of weights and "
        f"{figures['kv_bytes'] / GB:.3f} GB of KV at {speed / GB:.1f} GB/s, "
        f"{100 * speed / most:.0f} % of what memory gives"
    )
