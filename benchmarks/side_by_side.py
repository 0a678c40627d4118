"""Compare two runners fairly: A B A B ..., the same seed for both each round, medians and ratios.

    python benchmarks/side_by_side.py --rounds 5 \\
        --a 'python benchmarks/generate.py CKPT B8,W2' \\
        --b 'python benchmarks/peer_transformers.py CKPT B8,W2'

Every command gets `--seed N` and prints one JSON line per workload.
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

Figures = dict[str, list[float]]  # workload -> tokens/s, one per round


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--a", required=True, help="command A")
    parser.add_argument("--b", required=True, help="command B, the one A is compared with")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    a, b = alternate(args.a, args.b, args.rounds)
    print(f"{'workload':10} {'A tok/s':>10} {'B tok/s':>10} {'A/B median':>11} {'A/B range':>15}")
    for workload in a:
        ratios = [x / y for x, y in zip(a[workload], b[workload], strict=True)]
        print(
            f"{workload:10} {statistics.median(a[workload]):10.1f} "
            f"{statistics.median(b[workload]):10.1f} {statistics.median(ratios):11.2f} "
            f"{min(ratios):7.2f}-{max(ratios):.2f}"
        )


def alternate(a: str, b: str, rounds: int) -> tuple[Figures, Figures]:
    """Run A and B in turn; a fresh seed each round, so that no cache carries over."""
    found_a: Figures = defaultdict(list)
    found_b: Figures = defaultdict(list)
    start = int(time.time())
    for turn in range(rounds):
        for command, found in ((a, found_a), (b, found_b)):
            for workload, speed in run(f"{command} --seed {start + turn}").items():
                found[workload].append(speed)
    return found_a, found_b


def run(command: str) -> dict[str, float]:
    """Tokens per second by workload; exits with the command's own words when it fails."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, check=False)
    rows = list(json_objects(done.stdout))
    if done.returncode or not rows:
        sys.exit(
            f"{command}\nexit status {done.returncode}, {len(rows)} figures\n{done.stderr[-2000:]}"
        )
    return {row["workload"]: row["tokens_per_s"] for row in rows}


def json_objects(text: str) -> list[dict[str, float]]:
    """The figures in a runner's output, which may share lines with its log."""
    decoder, found, at = json.JSONDecoder(), [], text.find('{"engine"')
    while at >= 0:
        row, at = decoder.raw_decode(text, at)
        found.append(row)
        at = text.find('{"engine"', at)
    return found


if __name__ == "__main__":
    main()
