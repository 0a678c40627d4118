"""What a GRPO step of the demo changes of its weights in bfloat16, and the bytes that saves.

    python benchmarks/delta_fraction.py [--lr 1e-6,1e-5,1e-4] [--steps 8] [--warm DIR]

Prepares the demo's policy as `make demo` does (``--warm`` keeps it in DIR, or takes it from there),
then, for each learning rate anew and held constant, runs the demo's own two FSDP2 ranks for some
steps against a service in bfloat16. After every step they send a delta: the codec itself counts the
elements that changed, and the bytes that travel. The trainer's weights and its optimizer are
float32, as in the demo. Prints one JSON line per learning rate.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[1] / "trainer_examples"
sys.path.insert(0, str(EXAMPLES))

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lr", default="1e-6,1e-5,1e-4", help="learning rates")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--encoding", default="delta", help="delta or delta-zstd")
    parser.add_argument("--warm", type=Path, default=None)
    parser.add_argument("--rank", type=json.loads, default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        as_rank(args.rank, args.encoding)
        return
    with tempfile.TemporaryDirectory() as scratch:
        warm = args.warm or Path(scratch) / "warm"
        prepare(warm)
        for number, lr in enumerate(map(float, args.lr.split(","))):
            into = Path(scratch) / str(number)
            into.mkdir()
            print(json.dumps(measure(args, warm, into, lr)), flush=True)


def prepare(warm: Path) -> None:
    """The demo's own supervised phase, unless ``warm`` holds its outcome already."""
    if (warm / "config.json").exists():
        return
    from addition_task import make_model, save_checkpoint, warm_up

    model = make_model(0, 5)
    warm_up(model, target=0.40, seed=0, max_steps=600)
    save_checkpoint(model, warm)


def measure(args: argparse.Namespace, warm: Path, scratch: Path, lr: float) -> dict[str, Any]:
    from processes import last_words, python_child, rollout_service

    flags = ("--tensor-parallel-size", "2", "--device", "cpu", "--dtype", "bfloat16")
    flags += ("--num-threads", "1", "--max-num-seqs", "512")
    rows: list[dict[str, Any]] = []
    with (
        rollout_service(warm, scratch / "service.log", *flags) as address,
        contextlib.ExitStack() as stack,
    ):
        settings = {
            "address": address, "checkpoint": str(warm), "output": str(scratch / "out"),
            "rendezvous": str(scratch / "rendezvous"), "ranks": RANKS, "steps": args.steps,
            "prompts": args.prompts, "samples": 8, "minibatches": 2, "lr": lr, "clip": 0.2,
            "seed": 0,
        }  # fmt: skip
        ranks = [
            stack.enter_context(
                python_child(
                    Path(__file__), scratch / f"rank{r}.log", "--encoding", args.encoding,
                    "--rank", json.dumps({**settings, "rank": r}),
                )
            )
            for r in range(RANKS)
        ]  # fmt: skip
        rows = [json.loads(line) for line in ranks[0].stdout or () if line.startswith("{")]
        if any(process.wait() for process in ranks):
            sys.exit("a trainer rank failed\n" + last_words(scratch / "rank0.log"))
    return summary(lr, rows[1:])  # the first is whole: nothing had been committed before it


def summary(lr: float, rows: list[dict[str, Any]]) -> dict[str, Any]:
    changed = [row["elements"] / row["of"] for row in rows]
    sent = [row["wire_bytes"] / row["bytes"] for row in rows]
    return {
        "lr": lr,
        "steps": len(rows),
        "elements": rows[0]["of"],
        "bytes": rows[0]["bytes"],
        "encoding": sorted({row["encoding"] for row in rows}),
        "changed": mean(changed),
        "changed_range": [min(changed), max(changed)],
        "sent": mean(sent),
        "sent_range": [min(sent), max(sent)],
        "saved_bytes": round(mean(row["bytes"] - row["wire_bytes"] for row in rows)),
    }


def as_rank(settings: dict[str, Any], encoding: str) -> None:
    """One of the demo's trainer ranks, which sends deltas and says what they were."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    import trainer_rank
    from processes import end_with_parent

    end_with_parent()
    torch.set_num_threads(1)
    trainer_rank.scheduled_lr = lambda lr, number, steps: lr
    rendezvous = f"file://{settings['rendezvous']}"
    rank = settings["rank"]
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=RANKS, timeout=limit
    )
    trainer = trainer_rank.Trainer(trainer_rank.Settings(**settings))
    trainer.rollout = Deltas(trainer.rollout, encoding, rank == 0)
    for number in range(1, settings["steps"] + 2):
        trainer.step(number)
    trainer.rollout.shutdown()
    dist.destroy_process_group()


class Deltas:
    """A connection whose updates are deltas."""

    def __init__(self, rollout: Any, encoding: str, tells: bool) -> None:
        self._rollout, self._encoding, self._tells = rollout, encoding, tells

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rollout, name)

    def update_weights(self, model: Any) -> Any:
        receipt = self._rollout.update_weights(
            model, transport="grpc_stream", encoding=self._encoding
        )
        if self._tells:
            row = {
                "encoding": receipt.details["encoding"],
                "elements": int(receipt.details.get("sent_elements", 0)),
                "of": sum(p.numel() for p in model.parameters()),
                "wire_bytes": receipt.wire_bytes,
                "bytes": receipt.num_bytes,
            }
            print(json.dumps(row), flush=True)
        return receipt


if __name__ == "__main__":
    main()
