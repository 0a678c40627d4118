"""A cold start beside a plain read of the same files, which are in the page cache for both.

    python benchmarks/cold_start.py CHECKPOINT [--rounds 5] [--tensor-parallel-size 1]

Each round starts two processes: one reads the files into one buffer of their size, the other starts
an engine. Prints one JSON line: seconds of the read, of the engine's own loading (from opening the
files to weights in their place, whatever their layout), their ratio, and seconds from the engine's
process start to its first token. Medians, and for the ratio its range.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

START = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--num-threads", type=int, default=2, help="of each rank")
    parser.add_argument("--side", choices=("read", "engine"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps(read(args) if args.side == "read" else engine(args)), flush=True)
        return
    rounds = [side("read") | side("engine") for _ in range(args.rounds + 1)][1:]
    ratios = [found["load_s"] / found["read_s"] for found in rounds]
    print(
        json.dumps(
            {
                "checkpoint": args.checkpoint.name,
                "tensor_parallel_size": args.tensor_parallel_size,
                "bytes": rounds[0]["bytes"],
                **{key: median(found[key] for found in rounds)
                   for key in ("read_s", "load_s", "first_token_s")},
                "load_of_read": [median(ratios), min(ratios), max(ratios)],
            }
        )
    )  # fmt: skip


def side(name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--side", name],
        check=True, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def read(args: argparse.Namespace) -> dict[str, Any]:
    """Every file into one buffer, from its beginning to its end."""
    files = sorted(args.checkpoint.glob("*.safetensors"))
    sizes = [path.stat().st_size for path in files]
    started = time.perf_counter()
    buffer = memoryview(bytearray(sum(sizes)))
    at = 0
    for path, size in zip(files, sizes, strict=True):
        with open(path, "rb", buffering=0) as file:
            end = at + size
            while at < end:
                at += file.readinto(buffer[at:end])
    return {"read_s": time.perf_counter() - started, "bytes": sum(sizes)}


def engine(args: argparse.Namespace) -> dict[str, Any]:
    from rollout import Rollout, SamplingParams

    with Rollout(
        str(args.checkpoint),
        tensor_parallel_size=args.tensor_parallel_size,
        num_threads=args.num_threads,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        kv_cache_bytes=256 << 20,
        max_model_len=512,
    ) as started:
        started.generate([[1, 2, 3]], SamplingParams(max_tokens=1))
        first = time.perf_counter() - START
        loaded = max(rank["seconds"] for rank in started._async.backend.core.rank_info)
    return {"load_s": loaded, "first_token_s": first}


if __name__ == "__main__":
    main()
