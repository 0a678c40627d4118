"""Asynchronous GRPO on a fleet of three, of which one is killed and another added; and without.

    python benchmarks/async_fleet.py [--steps 60] [--seeds 0,1] [--picture PATH] [FLAGS]

Engines, a front over them, and ``trainer_examples/async_grpo.py`` at the front's address: all are
processes of this host, one thread each. After step ``--kill-after`` a member gets SIGKILL, after
step ``--add-after`` a fresh engine is added by ``POST /fleet/members``. For each seed a course with
these faults and one without, from the same checkpoint. FLAGS are the example's, for instance
``--max-staleness 0 --on-stale abort``. Prints a JSON line for each course; ``--picture`` draws the
reward of each step's samples. Status 1: a course has not come to its last step, or the added member
does not serve what was learnt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from fleet import engine, service, wait_for

EXAMPLES = Path(__file__).parents[1] / "trainer_examples"
MEMBERS = 3
LIMIT = 1200.0  # seconds in which a step has to come
ENGINE = ("--max-num-seqs", "64", "--num-kv-blocks", "256")
FRONT = ("--lease", "5")  # seconds: seven processes share what cores there are
SMOOTHED = 5  # steps of which the picture shows the mean

Rows = list[dict[str, Any]]


def main() -> int:
    args = parse_arguments()
    courses: list[tuple[dict[str, Any], Rows]] = []
    with tempfile.TemporaryDirectory() as scratch:
        start = args.start or make_start(Path(scratch) / "start", args.layers)
        for seed in map(int, args.seeds.split(",")):
            for faults in (True,) if args.faults_alone else (False, True):
                folder = Path(scratch) / f"{seed}-{faults}"
                folder.mkdir()
                courses.append(course(args, start, folder, seed, faults))
                print(json.dumps(courses[-1][0]), flush=True)
    if args.picture:
        draw(courses, args.picture)
    return 0 if all(found.get("added_equal", True) for found, _ in courses) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kill-after", type=int, default=15, help="a member, after this step")
    parser.add_argument("--add-after", type=int, default=25, help="another, after this step")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--start", type=Path, help="a checkpoint of the task; else one is made")
    parser.add_argument("--layers", type=int, default=2, help="of the one that is made")
    parser.add_argument("--faults-alone", action="store_true", help="no courses without them")
    parser.add_argument("--picture", type=Path)
    args, args.flags = parser.parse_known_args()
    if not 0 < args.kill_after <= args.add_after < args.steps:
        parser.error("the member is killed first, and the other added before the last step")
    return args


def make_start(path: Path, layers: int) -> Path:
    command = [sys.executable, str(EXAMPLES / "addition_task.py"), str(path)]
    subprocess.run([*command, "--target", "0.4", "--layers", str(layers)], check=True)
    return path


# ---- a course ----


def course(
    args: argparse.Namespace, start: Path, scratch: Path, seed: int, faults: bool
) -> tuple[dict[str, Any], Rows]:
    """What it came to, and each step's figures."""
    found: dict[str, Any] = {"seed": seed, "faults": faults}
    with contextlib.ExitStack() as stack:

        def member(_: object = None) -> tuple[str, str, subprocess.Popen[str]]:
            return stack.enter_context(engine(str(start), *ENGINE))

        with ThreadPoolExecutor() as pool:  # the fourth is the one that is added
            engines = list(pool.map(member, range(MEMBERS + faults)))
        over = [word for _, grpc, _ in engines[:MEMBERS] for word in ("--engine", grpc)]
        front = (*FRONT, "--record", str(scratch / "record"))
        http, grpc, _ = stack.enter_context(service("fleet", *over, *front))
        wait_for(http, lambda rows: serving(rows) == MEMBERS)
        example = stack.enter_context(Example(args, start, scratch, grpc, seed))
        if faults:
            example.wait(args.kill_after)
            engines[1][2].kill()
            found["killed_after_step"] = len(example.rows())
            wait_for(http, lambda rows: serving(rows) < MEMBERS)
            found["missed_after_step"] = len(example.rows())
            example.wait(args.add_after)
            post(http, {"address": engines[-1][1]})
            wait_for(http, lambda rows: serving(rows) == MEMBERS)
            found["added_after_step"] = len(example.rows())
        found |= example.summary()
        if faults:
            found |= look_at(engines[-1][1], grpc, scratch / "output" / "checkpoint")
        return found, example.rows()


class Example:
    """``async_grpo.py`` as a process at ``address``; it ends with the block."""

    def __init__(
        self, args: argparse.Namespace, start: Path, scratch: Path, address: str, seed: int
    ) -> None:
        self._path, self._log = scratch / "rows", scratch / "log"
        command = [sys.executable, str(EXAMPLES / "async_grpo.py"), "--address", address]
        command += ["--start", str(start), "--rows", str(self._path), "--seed", str(seed)]
        command += ["--steps", str(args.steps), "--output", str(scratch / "output"), "--no-goals"]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *args.flags], stdout=subprocess.PIPE, stderr=log, text=True
            )

    def __enter__(self) -> Example:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def rows(self) -> Rows:
        """Of the steps that have ended."""
        lines = self._path.read_text().splitlines(keepends=True) if self._path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait(self, step: int) -> None:
        """Until ``step`` has ended."""
        deadline = time.monotonic() + LIMIT
        while len(self.rows()) < step:
            if self._process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"step {step} did not come: {self._log.read_text()[-2000:]}")
            time.sleep(0.02)

    def summary(self) -> dict[str, Any]:
        """What it prints last."""
        said, _ = self._process.communicate(timeout=LIMIT)
        if self._process.returncode:
            sys.exit(f"the example failed: {self._log.read_text()[-2000:]}")
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found


def look_at(added: str, front: str, checkpoint: Path) -> dict[str, Any]:
    """Whether the member that was added holds what was learnt, and has sampled at all."""
    from rollout import Rollout, SamplingParams

    with Rollout.connect(added) as member, Rollout.connect(front) as fleet:
        tokens = member.metrics().generation_tokens_total
        [output] = member.generate([[3, 7, 10, 8, 5, 11]], SamplingParams(max_tokens=1))
        live = fleet.weight_version
        [span] = output.outputs[0].weight_versions
        equal = span.version == live and member.check_weights(checkpoint).equal
    return {"version": live, "added_version": span.version, "added_equal": equal,
            "added_tokens": tokens}  # fmt: skip


def serving(rows: Rows) -> int:
    return sum(row["status"] == "serving" for row in rows)


def post(http: str, body: dict[str, str]) -> None:
    request = urllib.request.Request(
        f"http://{http}/fleet/members", json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )  # fmt: skip
    urllib.request.urlopen(request, timeout=60).close()


# ---- the picture ----


def draw(courses: Sequence[tuple[dict[str, Any], Rows]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for found, rows in courses:
        steps, values = zip(*smoothed(rows), strict=True)
        kind = "a member killed, one added" if found["faults"] else "without faults"
        colour, line = f"C{int(found['faults'])}", ("-", "--", ":", "-.")[found["seed"] % 4]
        label = f"{kind}, seed {found['seed']}"
        axes.plot(steps, values, color=colour, linestyle=line, label=label)
        for key in ("killed_after_step", "added_after_step"):
            if found["faults"]:
                axes.axvline(found[key] + 0.5, color="C1", linestyle=line, linewidth=0.6)
    axes.set(xlabel="step", ylabel=f"correct sums, mean of {SMOOTHED} steps", ylim=(0, 1))
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


def smoothed(rows: Rows) -> Iterator[tuple[int, float]]:
    rewards = [row["correct"] / row["samples"] for row in rows]
    for step in range(1, len(rows) + 1):
        yield step, mean(rewards[max(0, step - SMOOTHED) : step])


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what it started ends, too
    sys.exit(main())
