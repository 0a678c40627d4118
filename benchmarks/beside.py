"""A measure of this checkout and of another one, which take turns in processes of their own."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

Row = dict[str, float]


def add_flags(parser: argparse.ArgumentParser, rounds: int) -> None:
    parser.add_argument("--beside", help="another checkout")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace, measure: Callable[[], Row], words: Sequence[str]) -> None:
    """Print what ``measure`` gives here; with ``--beside`` the medians of both checkouts, by the
    same script with ``words``, and their ratios.
    """
    if args.beside is None:
        _show({"ms": measure()}, args.json)
        return
    roots = {"here": str(Path(__file__).parents[1]), "beside": args.beside}
    turns: dict[str, list[Row]] = {name: [] for name in roots}
    for _ in range(args.rounds):
        for name, root in roots.items():
            turns[name].append(_elsewhere(root, words))
    medians = {
        name: {key: statistics.median(turn[key] for turn in found) for key in found[0]}
        for name, found in turns.items()
    }
    here, there = medians.values()
    medians["ratio"] = {key: here[key] / there[key] for key in here}
    _show(medians, args.json)


def _elsewhere(root: str, words: Sequence[str]) -> Row:
    command = [sys.executable, "-W", "ignore", sys.argv[0], "--json", *words]
    env = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: Row = json.loads(done.stdout.splitlines()[-1])["ms"]  # libraries may print before it
    return found


def _show(rows: dict[str, Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows))
        return
    names = list(next(iter(rows.values())))
    print("| | " + " | ".join(names) + " |")
    print("|---" * (len(names) + 1) + "|")
    for title, row in rows.items():
        print(f"| {title} | " + " | ".join(f"{row[name]:.3f}" for name in names) + " |")
