"""Fleets of many sizes in virtual time: what an update takes, and whether every promise holds.

    python benchmarks/simulated_fleets.py [--members 64,1024] [--updates 1000] [--faults 1000]
        [--fault-rate 1 | --fault-every SECONDS] [--of-all SHARE] [--loss 0.01] [--seed 0]
        [--limit SECONDS] [--rows FILE.jsonl] [--curve FILE.png]

A line for each size, in turn; status 1, and a traceback, where a promise was broken. Times are the
simulator's (rollout/fleet/simulation/), whatever the machine. ``--fault-rate``: faults a second
in the whole fleet; ``--fault-every``: seconds from one fault of a member to its next, on average.
``--limit``, and SIGTERM, end a course after the update that is under way, and then let it come to
rest. ``--rows`` has the figures appended; ``--curve`` draws all that it holds.
"""

from __future__ import annotations

import argparse
import gc
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rollout.fleet.simulation.findings import Weather
from rollout.fleet.simulation.simulator import Simulation

TELL = 60.0  # seconds between two words of a course that is under way


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--members", type=_numbers, default=[64], help="several; 0: only draw")
    parser.add_argument("--updates", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=1000, help="at most")
    parser.add_argument("--fault-rate", type=float, default=1.0)
    parser.add_argument("--fault-every", type=float)
    parser.add_argument("--of-all", type=float, help="share that befalls coordinator and disk")
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--quorum", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=float("inf"), help="of processor time, each")
    parser.add_argument("--rows", type=Path)
    parser.add_argument("--curve", type=Path)
    args = parser.parse_args()
    gc.disable()  # nothing in a course refers to itself: looking for that took half of its time
    found = []
    for members in filter(None, args.members):
        found.append(course(members, args))
        if args.rows:
            with args.rows.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    if args.curve:
        lines = args.rows.read_text().splitlines() if args.rows else ()
        draw([json.loads(line) for line in lines] or found, args.curve)


def course(members: int, args: argparse.Namespace) -> dict[str, Any]:
    rate = members / args.fault_every if args.fault_every else args.fault_rate
    simulation = Simulation(
        members=members, seed=args.seed, quorum=min(members, args.quorum),
        weather=Weather(loss=args.loss), fault_rate=rate, of_all=args.of_all,
    )  # fmt: skip
    ends = Ends(simulation, args.limit)
    signal.signal(signal.SIGTERM, ends.now)
    found = simulation.run(args.updates, args.faults, ends)
    spent = time.process_time() - ends.began
    print(f"{members} members: {found}; {spent:.0f} s of processor time", flush=True)
    return {"members": members, "fault_rate": rate, "processor_seconds": spent, **found.row()}


class Ends:
    """Whether a course is to end, asked after each update; tells now and then how far it is."""

    def __init__(self, simulation: Simulation, limit: float) -> None:
        self._simulation = simulation
        self.began = time.process_time()
        self._until, self._told = self.began + limit, time.monotonic()

    def now(self, *_: object) -> None:
        self._until = 0.0

    def __call__(self) -> bool:
        if time.monotonic() - self._told > TELL:
            self._told = time.monotonic()
            self._simulation.found.seconds = self._simulation.now
            print(f"so far: {self._simulation.found}", file=sys.stderr, flush=True)
        return time.process_time() > self._until


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Over the members: seconds of an update and of a commit's skew, and what became of updates."""
    from matplotlib.figure import Figure

    rows = sorted(rows, key=lambda row: row["members"])
    sizes = [row["members"] for row in rows]
    figure = Figure(figsize=(8, 3.2), layout="constrained")
    times, shares = figure.subplots(1, 2)
    for name, label in (("total", "update"), ("skew", "commit skew")):
        for which, style in enumerate(("-", "--")):
            values = [row[name][which] for row in rows]
            text = f"{label}, {('median', 'p99')[which]}"
            color = {"total": "C0", "skew": "C1"}[name]
            times.plot(sizes, values, style, marker="o", color=color, label=text)
    times.set(yscale="log", ylabel="virtual seconds")
    times.legend(fontsize=7, loc=(0.02, 0.22))
    share = [100 * row["commits"] / (row["commits"] + row["aborts"]) for row in rows]
    shares.plot(sizes, share, marker="o", color="C2")
    shares.set(ylim=(0, 102), ylabel="% of updates that committed")
    for axis in (times, shares):
        axis.set(xscale="log", xlabel="members")
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
