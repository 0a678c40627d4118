"""What a decode step costs by batch, context and ranks, and what its scheduling costs.

    python benchmarks/scale.py CHECKPOINT [--batches 1,4,16,64,256] [--contexts 128,512,2048,8192]
        [--ranks 1,2] [--rounds 3] [--json FILE] [--picture FILE.png]
    python benchmarks/scale.py scheduler [--batches 1,16,64,256] [--context 1024]

Executors of 1 rank with 2 threads and of 2 ranks with 1 each are up together and take turns;
a cell is the median of the rounds, in milliseconds. Sequences share KV blocks beyond
``--pool-tokens``, which is more than the caches hold. ``scheduler`` needs no model: microseconds of
one step's schedule, arrays and booking, medians and minima of ``--steps``. Prints markdown.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from stepping import Decoding, running

from rollout.engine.scheduling.block_manager import BlockManager
from rollout.engine.scheduling.scheduler import Scheduler
from rollout.engine.sequences.sequence import Sequence
from rollout.engine.steps.batch import encode_batch
from rollout.generation import SamplingParams

BUSY = 0.25  # seconds of one turn, at least a step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT | scheduler")
    parser.add_argument("--batches", type=_numbers, default=[1, 4, 16, 64, 256])
    parser.add_argument("--contexts", type=_numbers, default=[128, 512, 2048, 8192])
    parser.add_argument("--context", type=int, default=1024, help="of scheduler")
    parser.add_argument("--ranks", type=_numbers, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="of scheduler")
    parser.add_argument("--pool-tokens", type=int, default=1 << 16)
    parser.add_argument("--weight-layout", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--picture", type=Path)
    args = parser.parse_args()
    if args.checkpoint == "scheduler":
        print("| sequences | schedule, us | arrays, us | booking, us |\n|---|---|---|---|")
        for batch in args.batches:
            cells = (
                f"{statistics.median(times):.0f} (least {min(times):.0f})"
                for times in scheduling(batch, args.context, args.steps)
            )
            print(f"| {batch} | {' | '.join(cells)} |", flush=True)
        return
    found = measure(args)
    print(table(found, args.ranks))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    if args.picture:
        draw(found, args.picture)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each cell: ranks, batch, context, and ``ms`` of each round."""
    found = []
    longest = max(args.contexts) + 64
    with contextlib.ExitStack() as stack:
        executors = [
            stack.enter_context(
                running(
                    args.checkpoint,
                    ranks,
                    args.pool_tokens,
                    longest=longest,
                    layout=args.weight_layout,
                )
            )
            for ranks in args.ranks
        ]
        for context in args.contexts:
            for batch in args.batches:
                sides = [Decoding(e, args.pool_tokens, batch, context) for e in executors]
                steps = [max(1, min(64, int(BUSY / side.turn(1)))) for side in sides]
                rounds: list[list[float]] = [[] for _ in sides]
                for _ in range(args.rounds):
                    for side, count, times in zip(sides, steps, rounds, strict=True):
                        times.append(1e3 * side.turn(count))
                print(f"{context} tokens, {batch}: {rounds} ms", file=sys.stderr, flush=True)
                for ranks, times in zip(args.ranks, rounds, strict=True):
                    found.append({"ranks": ranks, "batch": batch, "context": context, "ms": times})
    return found


def scheduling(batch: int, context: int, steps: int) -> tuple[list[float], ...]:
    """Microseconds of each of ``steps`` decode steps: schedule, arrays, booking."""
    blocks = BlockManager(batch * (context + steps + 64) // 32 + batch, 32, salt=1)
    scheduler = Scheduler(blocks, max_num_seqs=batch, max_num_batched_tokens=max(2048, batch))
    for i in range(batch):
        prompt = [3 + (7 * i + j) % 200 for j in range(context)]
        params = SamplingParams(max_tokens=steps + 64)
        scheduler.add(
            [
                Sequence(
                    seq_id=i, request_id=f"r{i}", index=0, params=params, seed=i,
                    prompt_token_ids=prompt,
                )
            ]
        )  # fmt: skip
    times: tuple[list[float], ...] = ([], [], [])
    while len(times[0]) < steps:
        started = time.perf_counter()
        work = scheduler.schedule()
        scheduled = time.perf_counter()
        encode_batch(work, 32)
        encoded = time.perf_counter()
        drawing = [entry.sequence for entry in work.entries if entry.samples]
        scheduler.advance(work)
        for sequence in drawing:
            sequence.append(7, 0, 0.0, 0.0, 0.0)
        booked = time.perf_counter()
        if len(work.entries) == batch and all(entry.num_new == 1 for entry in work.entries):
            for kept, a, b in zip(
                times, (started, scheduled, encoded), (scheduled, encoded, booked), strict=True
            ):
                kept.append(1e6 * (b - a))
    return times


# ---- for people ----


def table(found: list[dict[str, Any]], ranks: list[int]) -> str:
    """Rows by batch, columns by context; a cell has all ranks' milliseconds."""
    contexts = sorted({row["context"] for row in found})
    lines = [
        f"| ms a step, TP {' / '.join(map(str, ranks))} | "
        + " | ".join(f"{context} tokens" for context in contexts)
        + " |",
        "|---" * (1 + len(contexts)) + "|",
    ]
    for batch in sorted({row["batch"] for row in found}):
        cells = []
        for context in contexts:
            own = [r for r in found if (r["batch"], r["context"]) == (batch, context)]
            cells.append(" / ".join(f"{statistics.median(r['ms']):.3g}" for r in own))
        lines.append(f"| {batch} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: list[dict[str, Any]], path: Path) -> None:
    """Milliseconds of a step over the batch, a line for each context; ranks side by side."""
    from matplotlib.figure import Figure

    ranks = sorted({row["ranks"] for row in found})
    figure = Figure(figsize=(4 * len(ranks), 3.2), layout="constrained")
    axes = figure.subplots(1, len(ranks), squeeze=False, sharey=True)[0]
    for axis, size in zip(axes, ranks, strict=True):
        for context in sorted({row["context"] for row in found}):
            own = [r for r in found if (r["ranks"], r["context"]) == (size, context)]
            axis.plot(
                [r["batch"] for r in own],
                [statistics.median(r["ms"]) for r in own],
                marker="o",
                label=f"{context} tokens",
            )
        axis.set(xscale="log", yscale="log", title=f"TP {size}", xlabel="sequences")
        batches = sorted({row["batch"] for row in found})
        axis.set_xticks(batches, [str(batch) for batch in batches])
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms of a decode step")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=80)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
