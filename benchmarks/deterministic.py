"""deterministic=True: a soak of random schedules, and what it costs.

    python benchmarks/deterministic.py soak [--schedules 1000] [--first 1000] [--dtypes float32]
    python benchmarks/deterministic.py cost CHECKPOINT --dtype bfloat16 [--sequences 8]

The soak compares bits of tokens and all logprobs with those of the sequence alone: ``--schedules``
in each dtype, ten on each random engine, whose seeds count up from ``--first``. The cost is the
ratio of seconds, deterministic over default, of neighbouring batches: medians of ``--rounds``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from rollout import Rollout, SamplingParams

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def soak(schedules: int, first: int, dtypes: str) -> None:
    """Ends with an AssertionError that names the first sequence whose bits differ."""
    from determinism.schedules import Ways, alone, compare
    from tiny_models import write_tiny

    for dtype in (getattr(torch, name) for name in dtypes.split(",")):
        with tempfile.TemporaryDirectory() as model:
            write_tiny(model, "qwen3", dtype=dtype)
            wanted, ways, started = alone(model, 64), Ways(), time.perf_counter()
            for seed in range(schedules // 10):
                compare(model, wanted, first + seed, 10, ways)
            print(f"{dtype}: equal bits, {ways}, {time.perf_counter() - started:.0f} s", flush=True)


def cost(checkpoint: str, dtype: str, sequences: int, new_tokens: int, rounds: int) -> None:
    settings = {
        "dtype": dtype,
        "skip_tokenizer_init": True,
        "kv_cache_bytes": 1 << 28,
        "enable_prefix_caching": False,
        "num_threads": 2,
        "max_model_len": 512,
    }
    prompts = [[(7 * i + 3 * j) % 1000 for j in range(64)] for i in range(sequences)]
    params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
    with (
        Rollout(checkpoint, deterministic=True, **settings) as fixed,
        Rollout(checkpoint, **settings) as default,
    ):
        ratios = []
        for turn in range(rounds + 1):
            seconds = []
            for engine in (fixed, default) if turn % 2 else (default, fixed):
                started = time.perf_counter()
                engine.generate(prompts, params)
                seconds.append(time.perf_counter() - started)
            if turn:  # the first warms up
                ratios.append(seconds[0] / seconds[1] if turn % 2 else seconds[1] / seconds[0])
    low, high = min(ratios), max(ratios)
    print(
        f"{checkpoint} {dtype}, {sequences} x 64 + {new_tokens}: deterministic / default "
        f"{statistics.median(ratios):.2f} ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("soak")
    command.add_argument("--schedules", type=int, default=1000, help="of each dtype")
    command.add_argument("--first", type=int, default=1000, help="seed of the first engine")
    command.add_argument("--dtypes", default="float32,bfloat16")
    command = commands.add_parser("cost")
    command.add_argument("checkpoint")
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--sequences", type=int, default=8)
    command.add_argument("--new-tokens", type=int, default=32)
    command.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.command == "soak":
        soak(args.schedules, args.first, args.dtypes)
    else:
        cost(args.checkpoint, args.dtype, args.sequences, args.new_tokens, args.rounds)


if __name__ == "__main__":
    main()
