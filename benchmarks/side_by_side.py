"""Compare two runners fairly: both up, A B A B ..., the same seed for both in a round.

    python benchmarks/side_by_side.py --rounds 5 \\
        --a 'python benchmarks/generate.py CKPT B8,W2 --num-threads 2' \\
        --b 'python benchmarks/peer_transformers.py CKPT B8,W2 --num-threads 2'

Each command is started once (with `--turns`, see `runner.py`), so both engines hold their memory
while one works. Prints a table of medians and of the rounds' ratios: whole calls in tokens per
second, decoding alone (what a call takes beyond its first tokens), and the time of a call that
asks for one token of each sequence. Memory is the sum of the peaks of a runner's processes.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

FIGURES = {  # title: (what a row gives, whether more is better)
    "tokens/s": (lambda row: row["tokens_per_s"], True),
    "decoding, tokens/s": (
        lambda row: (
            (row["new_tokens"] - row["sequences"]) / (row["seconds"] - row["first_token_s"])
        ),
        True,
    ),
    "first tokens, s": (lambda row: row["first_token_s"], False),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--a", required=True, help="command A")
    parser.add_argument("--b", required=True, help="command B, the one A is compared with")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    a, b = Runner(args.a), Runner(args.b)
    try:
        seed = int(time.time())
        for turn in range(args.rounds):  # a fresh seed each, so that no cache carries over
            a.turn(seed + turn)
            b.turn(seed + turn)
        report(a, b)
    finally:
        a.stop()
        b.stop()


def report(a: Runner, b: Runner) -> None:
    print(f"| workload | figure | {a.engine} | {b.engine} | better by (range) |")
    print("|---|---|---|---|---|")
    for workload, rows in a.rows.items():
        for title, (value, more) in FIGURES.items():
            ours, theirs = map(value, rows), map(value, b.rows[workload])
            pairs = list(zip(ours, theirs, strict=True))
            ratios = [x / y if more else y / x for x, y in pairs]
            medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
            print(
                f"| {workload} | {title} | {medians[0]:.2f} | {medians[1]:.2f} "
                f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
            )
    later = b.ready / a.ready
    print(f"| | first token after start, s | {a.ready:.1f} | {b.ready:.1f} | {later:.1f} |")
    ours, theirs = a.peak_memory() / 1e9, b.peak_memory() / 1e9
    print(f"| | peak memory, GB | {ours:.2f} | {theirs:.2f} | {theirs / ours:.2f} |")


class Runner:
    """A runner's process that waits for its turns."""

    def __init__(self, command: str) -> None:
        self.command = f"{command} --turns"
        self.rows: dict[str, list[dict[str, Any]]] = defaultdict(list)
        self.process = subprocess.Popen(
            shlex.split(self.command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        first = self._until("first_token_after_start_s")
        self.engine, self.ready = first["engine"], first["first_token_after_start_s"]

    def turn(self, seed: int) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        self._until("turn")

    def _until(self, key: str) -> dict[str, Any]:
        """Keep the figures up to the line that has ``key``; other output is the engine's log."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            at = line.find('{"engine"')
            if at < 0:
                continue
            row = json.loads(line[at:])
            if key in row:
                return row
            self.rows[row["workload"]].append(row)
        sys.exit(f"{self.command}\nended with status {self.process.wait()} before its turn did")

    def peak_memory(self) -> int:
        """Bytes: the peak resident sets of its processes, each with the pages it shares."""
        found, pids = 0, [self.process.pid]
        while pids:
            pid = pids.pop()
            status = Path(f"/proc/{pid}/status").read_text()
            found += int(status.split("VmHWM:")[1].split()[0]) * 1024
            for task in Path(f"/proc/{pid}/task").iterdir():
                pids += map(int, (task / "children").read_text().split())
        return found

    def stop(self) -> None:
        """Close its input, which ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()


if __name__ == "__main__":
    main()
