"""A trainer that only writes checkpoints, and a service that follows them: checkpoints on disk.

    python trainer_examples/follow_checkpoints.py [--checkpoints N] [--replicas N] [--output DIR]

The trainer (a process of its own, which learns the sums from their answers) knows nothing of a
service: every few steps it saves OUTPUT/checkpoint-STEP. `rollout serve --follow OUTPUT` makes each
complete one its next version, STEP, beside generation; this script watches the version move, and
samples. At the end `check_weights` compares the files of the last one with what the service holds.

Exit status 0: every version that was seen answers, the last one is the last checkpoint, tensor by
tensor, and answers a fifth more of the sums than the first did. Else 1, and a goal that was missed
is named.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from addition_task import answer_batch, make_model, problems, save_checkpoint
from answering import evaluate
from driver import Help, judged, make_output
from processes import (
    DemoError,
    end_in_order,
    end_with_parent,
    last_words,
    python_child,
    rollout_service,
)
from torch import set_num_threads
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from rollout import Rollout

WAIT = 60.0  # seconds for the service to take a checkpoint


def main() -> int:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        end_with_parent()
        train(**json.loads(sys.argv[1]))
        return 0
    args = parse_arguments()
    end_in_order()
    start = time.perf_counter()
    make_output(args.output)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            summary = follow(args, Path(scratch))
        except DemoError as error:
            print(f"example: {error}", file=sys.stderr)
            return 1
    summary["seconds"] = round(time.perf_counter() - start, 1)
    first, last = summary["reward_first"], summary["reward_last"]
    learnt = args.no_goals or last > first + 0.2
    goals = {
        f"the last reward {last:.3f} is above {first + 0.2:.3f} after {first:.3f}": learnt,
        "the service holds the weights of the last checkpoint": summary["equal"],
    }
    return judged(summary, [goal for goal, met in goals.items() if not met])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    parser.add_argument("--checkpoints", type=int, default=8, help="to write, and to follow")
    parser.add_argument("--every", type=int, default=50, help="steps from one to the next")
    parser.add_argument("--lr", type=float, default=5e-4, help="of the trainer")
    parser.add_argument("--replicas", type=int, default=1, help="of the engine, updated as one")
    parser.add_argument("--layers", type=int, default=5, help="of the model")
    parser.add_argument("--seed", type=int, default=0, help="of everything drawn")
    parser.add_argument("--output", type=Path, default=Path("demo_output/checkpoints"), help="new")
    parser.add_argument("--no-goals", action="store_true", help="exit with 0 whatever was learnt")
    args = parser.parse_args()
    if args.output.exists():
        parser.error(
            f"--output {args.output} exists, and would be followed: remove it, or name another"
        )
    return args


def follow(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    save_checkpoint(make_model(args.seed, args.layers), scratch / "start")
    flags = ["--device", "cpu", "--dtype", "float32", "--num-threads", "1"]
    flags += ["--replicas", str(args.replicas)]
    flags += ["--weight-dir", str(args.output), "--follow", str(args.output)]
    settings = {key: getattr(args, key) for key in ("checkpoints", "every", "lr", "seed")}
    where = {"start": str(scratch / "start"), "output": str(args.output)}
    log = scratch / "trainer.log"
    seen: dict[int, float] = {}
    with (
        rollout_service(scratch / "start", scratch / "service.log", *flags) as address,
        Rollout.connect(address) as rollout,
        python_child(Path(__file__), log, json.dumps({**settings, **where})) as trainer,
    ):
        last, deadline = args.checkpoints * args.every, time.monotonic() + WAIT
        while True:
            version = rollout.weight_version
            if version not in seen:
                seen[version] = evaluate(rollout, args.seed)
                print(f"version {version}: mean reward {seen[version]:.3f}", flush=True)
            if version == last:
                break
            if trainer.poll() not in (None, 0):
                raise DemoError(f"the trainer failed\n{last_words(log)}")
            if trainer.poll() is None:
                deadline = time.monotonic() + WAIT
            elif time.monotonic() > deadline:
                raise DemoError(
                    f"version {last} did not come:\n{last_words(scratch / 'service.log')}"
                )
            time.sleep(0.2)
        equal = rollout.check_weights(args.output / f"checkpoint-{last}").equal
    return {
        "versions": list(seen),
        "version_last": max(seen),
        "reward_first": seen[min(seen)],
        "reward_last": seen[max(seen)],
        "equal": equal,
    }


def train(start: str, output: str, checkpoints: int, every: int, lr: float, seed: int) -> None:
    """Supervised steps, and a checkpoint every few of them; nothing here knows of a service."""
    from transformers import Qwen3ForCausalLM

    set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(start)
    optimizer = AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    rng = random.Random(f"follow-{seed}")
    for step in range(1, checkpoints * every + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / 50)
        ids, labels = answer_batch(problems(128, rng))
        loss = cross_entropy(model(ids).logits.flatten(0, 1), labels.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        if step % every == 0:
            save_checkpoint(model, Path(output) / f"checkpoint-{step}")


if __name__ == "__main__":
    sys.exit(main())
