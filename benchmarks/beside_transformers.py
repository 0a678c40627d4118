"""This engine and transformers' `generate` in one process, a short batch of each in turn.

    python benchmarks/beside_transformers.py CHECKPOINT B8,W2 [--rounds 7] [--new-tokens 32]

On a machine whose speed changes from minute to minute two calls that follow each other at once can
still be compared. Both sides use torch's threads; each round has fresh prompts.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace

import torch
from generate import generate as ours
from peer_transformers import generate as theirs
from transformers import AutoModelForCausalLM
from workloads import parse_names, requests

from rollout import Rollout


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("workloads", type=parse_names)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--num-threads", type=int, default=2)
    parser.add_argument("--weight-layout", default="auto")
    args = parser.parse_args()
    torch.set_num_threads(args.num_threads)
    model = AutoModelForCausalLM.from_pretrained(args.checkpoint, dtype=torch.bfloat16).eval()
    with Rollout(
        args.checkpoint,
        dtype="bfloat16",
        num_threads=args.num_threads,
        weight_layout=args.weight_layout,
        skip_tokenizer_init=True,
        kv_cache_bytes=1 << 29,
    ) as engine:
        for name in args.workloads:
            speeds: tuple[list[float], list[float]] = ([], [])
            for turn in range(args.rounds + 1):
                batch = [replace(r, new_tokens=args.new_tokens) for r in requests(name, turn)]
                seconds = (ours(engine, batch), theirs(model, batch, args.new_tokens))
                if turn:  # the first warms up
                    for found, each in zip(speeds, seconds, strict=True):
                        found.append(len(batch) * args.new_tokens / each)
            ratios = [a / b for a, b in zip(*speeds, strict=True)]
            ours_median, theirs_median = map(statistics.median, speeds)
            print(
                f"{name:4} rollout {ours_median:7.1f} tok/s   transformers {theirs_median:7.1f} "
                f"tok/s   ratio {statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
