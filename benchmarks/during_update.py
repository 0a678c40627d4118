"""Tokens a second of running streams while an update is staged, beside an undisturbed while.

    python benchmarks/during_update.py CHECKPOINT [--rounds 5] [--sequences 8] [--transport auto]
                                       [--source plain|fsdp2] [--tensor-parallel-size 1]

A service, its trainer and this client, which streams greedy samples without an end of their own.
In each round the tokens that arrive during one update are counted, and those of as long a while
just before it. Prints one JSON line: the median ratio of the two rates and its range, the time
between tokens of one stream undisturbed (median and most) and across the commits (most), and the
stall that the receipts tell, in seconds. The first update, which builds the shadow, is not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

from sync import child, expect, service, spread
from trainer_group import TRAINERS

LONGEST = 400  # tokens; then the stream begins again


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--source", choices=("plain", "fsdp2"), default="plain")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bucket-mib", type=int, default=64)
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as scratch,
        service(args, tensor_parallel_size=args.tensor_parallel_size) as (_, address),
    ):
        print(json.dumps(measure(args, address, scratch)), flush=True)


def measure(args: argparse.Namespace, address: str, scratch: str) -> dict[str, Any]:
    from rollout import Rollout

    command = [sys.executable, __file__.replace("during_update", "sync"), args.checkpoint]
    command += ["--updates", str(args.rounds), "--source", args.source, "--wait"]
    command += ["--dtype", args.dtype, "--transport", args.transport]
    command += ["--bucket-mib", str(args.bucket_mib), "--address", address, "--scratch", scratch]
    count = 1 if args.source == "plain" else TRAINERS
    ratios, quiet, stalls, across = [], [], [], []
    with ExitStack() as stack:
        ranks = [stack.enter_context(child([*command, "--rank", str(r)])) for r in range(count)]
        expect(ranks, "loaded")
        engine = stack.enter_context(Rollout.connect(address, timeout=60.0))
        streams = stack.enter_context(Streams(engine, args.sequences))
        before = 3.0  # seconds; then as long as the update before
        for turn in range(args.rounds + 1):
            time.sleep(before + 1.0)
            for process in ranks:
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
            receipt = expect(ranks, "receipt")
            end, before = time.perf_counter(), receipt["seconds"]
            start = end - before
            time.sleep(1.0)  # tokens of the new version come, too
            if turn:
                during = streams.count(start, end)
                ratios.append(during / max(1, streams.count(start - before, start)))
                quiet += streams.gaps(start - before, start)
                across.append(max(streams.gaps(end - 1.0, end + 1.0)))
                stalls.append(receipt["timings"]["stall"])
        transport, seconds = receipt["transport"], before
    return {
        "checkpoint": args.checkpoint, "sequences": args.sequences, "source": args.source,
        "tensor_parallel_size": args.tensor_parallel_size, "transport": transport,
        "rate_during_of_undisturbed": spread(ratios), "last_update_s": seconds,
        "between_tokens_s": median(quiet), "between_tokens_most_s": max(quiet),
        "across_commit_most_s": spread(across), "stall_s": spread(stalls),
    }  # fmt: skip


class Streams:
    """Threads that stream for ever, and when their tokens arrived."""

    def __init__(self, engine: Any, count: int) -> None:
        self._engine, self._over = engine, threading.Event()
        self._arrivals: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # when, tokens
        self._threads = [threading.Thread(target=self._run, args=(i,)) for i in range(count)]

    def count(self, start: float, end: float) -> int:
        """Tokens."""
        return sum(new for found in self._within(start, end) for _, new in found)

    def gaps(self, start: float, end: float) -> list[float]:
        """Seconds between the tokens of each stream."""
        return [b - a for found in self._within(start, end) for (a, _), (b, _) in pairwise(found)]

    def _within(self, start: float, end: float) -> list[list[tuple[float, int]]]:
        return [[row for row in list(rows) if start <= row[0] < end] for rows in self._arrivals]

    def _run(self, index: int) -> None:
        from rollout import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=LONGEST, ignore_eos=True)
        while not self._over.is_set():
            known = 0
            for output in self._engine.stream([index + 1] * 16, params):
                count = len(output.outputs[0].token_ids)
                self._arrivals[index].append((time.perf_counter(), count - known))
                known = count
                if self._over.is_set():
                    break

    def __enter__(self) -> Streams:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(30)


if __name__ == "__main__":
    main()
