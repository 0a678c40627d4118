"""Asynchronous GRPO: generation never waits for the trainer, and every token knows its version.

    python trainer_examples/async_grpo.py [--steps N] [--output DIR]
    python trainer_examples/async_grpo.py --address HOST:PORT --start CHECKPOINT   # of that service

A thread keeps the service busy, call after call, through every update; the trainer takes what
the last calls brought. So while version v + 1 is learnt, samples of v (and, where an update fell
into a call, of both) are on their way. The spans of a completion say which of its tokens are older
than the trainer's weights. Those weigh exp(trainer - sampler), at most 2, as in decoupled PPO
(https://arxiv.org/abs/2505.24298); the others must agree with the trainer to 1e-4, and weigh 1.
A token of a version that this trainer has not made is an error. The service may be a fleet, whose
members come and go meanwhile (benchmarks/async_fleet.py). Exit status: as grpo_fsdp2.py's, but half
as much again as the first reward, and above 0.7, is enough.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from addition_task import PAD, save_checkpoint
from answering import evaluate
from display import Display
from driver import drive_alone, parse_arguments, prepare
from grpo import (
    Batch,
    Sample,
    clipped_loss,
    descend,
    make_batch,
    scheduled_lr,
    token_logprobs,
)
from processes import rollout_service
from sampler import Sampler
from torch import Tensor, float32, full, no_grad, ones, set_num_threads, tensor
from torch.optim import AdamW
from transformers import Qwen3ForCausalLM

from rollout import Rollout

LARGEST_WEIGHT = 2.0
FLAGS: dict[str, dict[str, Any]] = {
    "--address": {"help": "HOST:PORT of a service that runs, started from --start"},
    "--rows": {"type": Path, "help": "a file for each step's figures, as JSON lines"},
    "--max-staleness": {"type": int, "help": "versions that a sample may fall behind (no bound)"},
    "--on-stale": {
        "choices": ("recompute", "finish", "abort"),
        "default": "recompute",
        "help": "what becomes of one that falls behind further",
    },
}


class AsyncTrainer:
    """One process with the whole policy; ``version`` is the last of those that it has ``made``.

    ``ages``: of all tokens it has learnt from, by versions behind its own.
    """

    def __init__(self, checkpoint: Path, address: str, args: argparse.Namespace) -> None:
        self._args = args
        self.model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=float32)
        self._optimizer = AdamW(self.model.parameters(), args.lr, (0.9, 0.99), weight_decay=0.0)
        self.rollout = Rollout.connect(address)
        self.version = self.rollout.weight_version
        self.made, self.ages = {self.version}, Counter[int]()

    def step(self, number: int, samples: list[Sample]) -> dict[str, Any]:
        whole = make_batch(samples, self._args.samples, PAD)
        versions = versions_of(samples, whole)
        self._count_ages(versions[whole.mask].tolist())
        with no_grad():
            now = token_logprobs(self.model, whole.ids)
        old = whole.mask & (versions < self.version)
        agreeing = (now - whole.logprobs).abs()[whole.mask & ~old]
        weights = (now - whole.logprobs).exp().clamp(max=LARGEST_WEIGHT).where(old, ones(()))
        # The clip is around the trainer's weights at the start of the step, whoever sampled.
        batch = replace(whole, logprobs=now, advantages=whole.advantages * weights)
        for group in self._optimizer.param_groups:
            group["lr"] = scheduled_lr(self._args.lr, number, self._args.steps)
        size = -(-len(samples) // self._args.minibatches)  # groups may have been dropped
        for first in range(0, len(samples), size):
            part = batch.part(slice(first, first + size))
            loss = clipped_loss(part, token_logprobs(self.model, part.ids), self._args.clip)
            descend(self.model, self._optimizer, loss)
        receipt = self.rollout.update_weights(self.model)
        self.version = receipt.version
        self.made.add(receipt.version)
        members = receipt.details.get("members", {"": "committed"})
        return {
            "step": number,
            "correct": sum(s.reward for s in samples),
            "samples": len(samples),
            "tokens": int(whole.mask.sum()),
            "older": float(old.sum() / whole.mask.sum()),
            "lag": int(receipt.version - 1 - versions[whole.mask].min()),
            "difference": float(agreeing.max()) if len(agreeing) else 0.0,
            "version": receipt.version,
            "members": sum(became == "committed" for became in members.values()),
            "sync_seconds": receipt.timings["total"],
            "stall_seconds": receipt.timings["stall"],
        }

    def _count_ages(self, versions: list[int]) -> None:
        if unknown := set(versions) - self.made:
            raise RuntimeError(f"tokens of versions that were never sent: {sorted(unknown)}")
        self.ages.update(self.version - version for version in versions)


def versions_of(samples: list[Sample], batch: Batch) -> Tensor:
    """The version of each sampled token, [samples, tokens]; -1 elsewhere."""
    versions = full(batch.ids.shape, -1)
    versions[batch.mask] = tensor([v for s in samples for v in s.versions])
    return versions


@contextmanager
def service(args: argparse.Namespace, scratch: Path) -> Iterator[str]:
    """Its address: of one that runs, or of one started here."""
    if args.address:
        yield args.address
        return
    flags = ("--device", "cpu", "--dtype", "float32", "--num-threads", "1", "--max-num-seqs", "512")
    flags += ("--replicas", str(args.replicas), *args.serve)
    with rollout_service(scratch / "warm", scratch / "service.log", *flags) as address:
        yield address


def run(args: argparse.Namespace, display: Display, scratch: Path) -> dict[str, Any]:
    prepare(args, display, scratch / "warm")
    set_num_threads(1)
    with service(args, scratch) as address:
        trainer = AsyncTrainer(scratch / "warm", address, args)
        first, version = evaluate(trainer.rollout, args.seed), trainer.version
        sampler = Sampler(address, args)
        started = time.perf_counter()
        sampler.start()
        rows = []
        for number in range(1, args.steps + 1):
            begun = time.perf_counter()
            row = trainer.step(number, sampler.take())
            rows.append(row | {"sample_seconds": time.perf_counter() - begun})
            display.add(rows[-1])
            if args.rows:
                with args.rows.open("a") as file:
                    print(json.dumps(rows[-1]), file=file)
        sampler.stop()
        seconds = time.perf_counter() - started
        save_checkpoint(trainer.model, args.output / "checkpoint")
        return {
            "reward_first": first,
            "reward_last": evaluate(trainer.rollout, args.seed),
            "steps": args.steps,
            "version_first": version,
            "version_last": trainer.version,
            "calls": sampler.calls,
            "tokens_per_second": round(sampler.tokens / seconds, 1),
            "older_tokens": round(sum(row["older"] for row in rows) / len(rows), 3),
            "tokens_by_age": {str(age): n for age, n in sorted(trainer.ages.items())},
            "mixed_samples": sampler.mixed,
            "stale_samples": dict(sampler.stale),
            "dropped_samples": sampler.dropped,
            "largest_lag": max(row["lag"] for row in rows),
            "max_logprob_diff": max(row["difference"] for row in rows),
            "weights_equal": trainer.rollout.check_weights(args.output / "checkpoint").equal,
        }


def main() -> int:
    defaults = {"output": Path("demo_output/async_grpo"), "ranks": 1}
    args = parse_arguments(__doc__ or "", defaults, FLAGS)
    if args.address and args.start is None:
        sys.exit("--address needs --start, the checkpoint that the service was started from")
    if args.address and args.serve:
        sys.exit("--serve is of a service that is started here, not of the one at --address")
    return drive_alone(args, run, goal=0.7, gain=1.5)


if __name__ == "__main__":
    sys.exit(main())
