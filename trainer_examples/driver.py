"""What the GRPO and PPO examples share: warm up, serve, start the trainer's ranks, sum up.

An example's file is run twice: by hand it drives, and with settings as its argument it is a rank.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Read when torch is loaded: threads that wait must not spin, for other processes share the cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from addition_task import make_model, save_checkpoint, warm_up
from display import Display, draw
from processes import DemoError, end_in_order, last_words, python_child, rollout_service
from transformers.utils.logging import disable_progress_bar

LARGEST_DIFFERENCE = 1e-4
GOOD = 0.9  # a reward that is enough, whatever it was at the start
TOO_FEW_SAMPLES = "--samples must be at least 2: advantages are relative to the prompt's others"


def example(file: str, about: str, kind: type, **settings: Any) -> int:
    """What an example's file does; ``kind``: its ``Trainer``; ``settings``: those of ``drive``."""
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        from trainer_rank import main as rank_main

        rank_main(kind)
        return 0
    return drive(Path(file), about, **settings)


def drive(script: Path, about: str, goal: float = 0.8, gain: float = 2.0, **defaults: Any) -> int:
    """Warm up, serve, start ``script`` as every rank, and show how it went; the exit status.

    ``goal`` and ``gain``: what the last reward has to exceed, and how many times the first, or
    0.9 where the first was too good for that.
    """
    args = parse_arguments(about, defaults)
    done = shown(args, lambda display, scratch: run(args, display, scratch, script))
    if done is None:
        return 1
    summary, display = done
    print(f"saved the checkpoint {args.output / 'checkpoint'}")
    print(draw(display.rows, args.output / "reward.png", script.stem))
    return judged(summary, [] if args.no_goals else missed_goals(summary, goal, gain))


def drive_alone(
    args: argparse.Namespace,
    work: Callable[[argparse.Namespace, Display, Path], dict[str, Any]],
    **goals: float,
) -> int:
    """As ``drive``, of an example that trains in this process; ``work`` gives the summary."""
    if args.ranks > 1 or args.deterministic:
        sys.exit("one process trains here, by torch's ops: leave out --ranks and --deterministic")
    done = shown(args, lambda display, scratch: work(args, display, scratch))
    if done is None:
        return 1
    return judged(done[0], [] if args.no_goals else missed_goals(done[0], **goals))


def shown(
    args: argparse.Namespace, work: Callable[[Display, Path], dict[str, Any]]
) -> tuple[dict[str, Any], Display] | None:
    """The summary of ``work``, which has a folder for its own, and what was shown; None where a
    process has failed, which was said.
    """
    end_in_order()
    start = time.perf_counter()
    make_output(args.output)
    with Display(args.steps) as display, tempfile.TemporaryDirectory() as scratch:
        try:
            summary = work(display, Path(scratch))
        except DemoError as error:
            print(f"demo: {error}", file=sys.stderr)
            return None
    return summary | {"seconds": round(time.perf_counter() - start, 1)}, display


def make_output(folder: Path) -> None:
    """Ends the process where it cannot be made: before anything was learnt that it should hold."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.exit(f"demo: --output {folder} cannot be made: {error.strerror}")


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """The docstring as it is, and every default."""


def parse_arguments(
    about: str, defaults: dict[str, Any], more: dict[str, dict[str, Any]] | None = None
) -> argparse.Namespace:
    """``more``: flags of this example alone, and how ``add_argument`` is to take each."""
    parser = argparse.ArgumentParser(description=about, formatter_class=Help)
    parser.add_argument("--steps", type=int, default=100, help="of sampling, learning, pushing")
    parser.add_argument("--prompts", type=int, default=48, help="of a step, over all ranks")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--minibatches", type=int, default=2, help="optimizer steps of a step")
    parser.add_argument("--lr", type=float, default=2e-4, help="at its peak")
    parser.add_argument("--clip", type=float, default=0.2, help="of the probability ratio")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn")
    parser.add_argument("--ranks", type=int, default=2, help="of the trainer")
    parser.add_argument("--replicas", type=int, default=1, help="of the engine, updated as one")
    parser.add_argument(
        "--serve", type=shlex.split, default="", help='more flags of `rollout serve`, in one "..."'
    )
    parser.add_argument("--layers", type=int, default=5, help="of the model")
    parser.add_argument(
        "--warmup-target", type=float, default=0.40, help="mean reward to start from"
    )
    parser.add_argument("--warmup-steps", type=int, default=600, help="supervised, at most")
    parser.add_argument("--start", type=Path, help="a checkpoint of this task; no warm-up then")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="a folder")
    parser.add_argument(
        "--deterministic", action="store_true", help="trainer and engine run the same ops"
    )
    parser.add_argument("--no-goals", action="store_true", help="exit with 0 whatever was learnt")
    for flag, options in (more or {}).items():
        parser.add_argument(flag, **options)
    parser.set_defaults(**{"service": True, "fewest_samples": 2, **defaults})
    args = parser.parse_args()
    for name in (
        "steps",
        "prompts",
        "samples",
        "minibatches",
        "warmup_steps",
        "layers",
        "ranks",
        "replicas",
    ):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if (args.replicas > 1 or args.serve) and not args.service:
        parser.error("--replicas, --serve: this example has an engine of its own, and no service")
    if args.samples < args.fewest_samples:
        parser.error(TOO_FEW_SAMPLES)
    if args.start is not None and not (args.start / "config.json").is_file():
        parser.error(f"--start {args.start}: no checkpoint lies there; addition_task.py makes one")
    if args.prompts % (args.ranks * args.minibatches):
        parser.error(f"--prompts must be a multiple of {args.ranks} ranks x --minibatches")
    return args


def run(args: argparse.Namespace, display: Display, scratch: Path, script: Path) -> dict[str, Any]:
    checkpoint = scratch / "warm"
    prepare(args, display, checkpoint)
    if not args.service:
        display.say(f"{args.steps} steps on {args.ranks} ranks, each of the trainer and the engine")
        return train(args, display, scratch, "", script)
    flags = ("--tensor-parallel-size", "2", "--device", "cpu", "--dtype", "float32")
    flags += ("--num-threads", "1", "--max-num-seqs", "512")
    if args.deterministic:
        flags += ("--deterministic",)
    if args.replicas > 1:
        flags += ("--replicas", str(args.replicas))
    flags += tuple(args.serve)
    with rollout_service(checkpoint, scratch / "service.log", *flags) as address:
        display.say(
            f"rollout service at {address}; {args.steps} steps on {args.ranks} trainer ranks"
        )
        return train(args, display, scratch, address, script)


def prepare(args: argparse.Namespace, display: Display, checkpoint: Path) -> None:
    """The supervised phase, and the checkpoint the service starts from."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed, where installed, warns of it
    disable_progress_bar()
    if args.start is not None:
        checkpoint.symlink_to(args.start.resolve())
        return
    torch.set_num_threads(os.cpu_count() or 1)
    model = make_model(args.seed, args.layers)
    count = sum(p.numel() for p in model.parameters()) / 1e6
    display.say(f"a Qwen3 of {count:.1f} M parameters, warming up on two-digit sums")
    steps, reached = warm_up(
        model, target=args.warmup_target, seed=args.seed, max_steps=args.warmup_steps
    )
    display.say(f"after {steps} supervised steps: mean reward {reached:.2f}")
    save_checkpoint(model, checkpoint)


def train(
    args: argparse.Namespace, display: Display, scratch: Path, address: str, script: Path
) -> dict[str, Any]:
    """Start the ranks, show what rank 0 reports, and sum it up."""
    names = ("steps", "prompts", "samples", "minibatches", "lr", "clip", "seed", "deterministic")
    settings = {name: getattr(args, name) for name in names} | {
        "address": address,
        "checkpoint": str(scratch / "warm"),
        "output": str(args.output / "checkpoint"),
        "rendezvous": str(scratch / "rendezvous"),
        "ranks": args.ranks,
    }
    events: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(
                python_child(
                    script, scratch / f"rank{rank}.log", json.dumps({**settings, "rank": rank})
                )
            )
            for rank in range(args.ranks)
        ]
        for line in ranks[0].stdout or ():
            if not line.startswith("{"):  # a library that logs to stdout
                continue
            events.append(json.loads(line))
            if events[-1]["event"] == "step":
                display.add(events[-1])
        codes = [process.wait() for process in ranks]
    if any(codes):
        words = [f"rank {r}: {last_words(scratch / f'rank{r}.log')}" for r in range(args.ranks)]
        raise DemoError(f"a trainer rank failed: {codes}\n" + "\n".join(words))
    return summarise(events) | {"deterministic": args.deterministic}


def summarise(events: list[dict[str, Any]]) -> dict[str, Any]:
    steps = [event for event in events if event["event"] == "step"]
    return {
        "reward_first": events[0]["reward"],
        "reward_last": events[-1]["reward"],
        "steps": len(steps),
        "version_first": events[0]["version"],
        "version_last": steps[-1]["version"],
        "max_logprob_diff": max(step["difference"] for step in steps),
        "weights_equal": events[-1]["equal"],
    }


def judged(summary: dict[str, Any], missed: list[str]) -> int:
    """Shows how it went; the exit status."""
    for goal in missed:
        print(f"goal missed: {goal}", file=sys.stderr)
    print(json.dumps(summary), flush=True)
    return 1 if missed else 0


def wanted_reward(first: float, gain: float) -> float:
    """``gain`` times the first; of a start too good for that ``GOOD``, or no less than it had."""
    return max(first, min(gain * first, GOOD))


def missed_goals(summary: dict[str, Any], goal: float = 0.8, gain: float = 2.0) -> list[str]:
    first, last = summary["reward_first"], summary["reward_last"]
    wanted = wanted_reward(first, gain)
    moved = summary["version_last"] - summary["version_first"]
    allowed = 0.0 if summary.get("deterministic") else LARGEST_DIFFERENCE
    goals = {
        f"the last reward {last:.3f} is above {goal}": last > goal,
        f"the last reward {last:.3f} is at least {wanted:.3f} after {first:.3f}": last >= wanted,
        f"the version moved once a step: {moved} in {summary['steps']}": moved == summary["steps"],
        f"logprobs differ by {summary['max_logprob_diff']:.1e}, at most {allowed}": (
            summary["max_logprob_diff"] <= allowed
        ),
        "the engine holds the weights that were saved": summary["weights_equal"],
    }
    return [goal for goal, met in goals.items() if not met]
