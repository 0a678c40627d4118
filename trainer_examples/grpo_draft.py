"""GRPO with a draft model that learns from the policy, and is updated in the same transaction.

    python trainer_examples/grpo_draft.py [--frozen-draft] [--steps N] [--output DIR]

The engine drafts tokens with a model of one layer, and verifies them in the next step: no token
changes, whoever drafts (docs/speculative_decoding.md). That model is distilled from the policy
before the first step, and after each on the samples of that step; with --frozen-draft it stays as
it was, and so falls behind. The summary says how many of the drafted tokens were right in the first
and in the last tenth of the steps. Exit status: as grpo_fsdp2.py's.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

from addition_task import PAD, problems, save_checkpoint
from answering import answers, evaluate
from display import Display
from driver import drive_alone, parse_arguments, prepare
from grpo import (
    Batch,
    Sample,
    clipped_loss,
    descend,
    largest_difference,
    make_batch,
    scheduled_lr,
    token_logprobs,
)
from torch import float32, nn, no_grad, set_num_threads
from torch.nn.functional import kl_div
from torch.optim import AdamW
from transformers import Qwen3ForCausalLM

from rollout import Rollout

DRAFTED = 3  # tokens; an answer has about four
FLAGS: dict[str, dict[str, Any]] = {
    "--frozen-draft": {"action": "store_true", "help": "the draft model learns no more"},
    "--draft-calls": {"type": int, "default": 60, "help": "of samples that it learns from first"},
    "--draft-lr": {"type": float, "default": 1e-3, "help": "its learning rate"},
}


def small_copy(policy: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """The policy's first layer, with its embedding, last norm and head."""
    one = {"num_hidden_layers": 1, "layer_types": policy.config.layer_types[:1]}
    config = type(policy.config)(**policy.config.to_dict() | one)
    draft = Qwen3ForCausalLM(config).to(float32)
    draft.load_state_dict(policy.state_dict(), strict=False)
    return draft


class DraftTrainer:
    """One process with policy, draft model and engine."""

    def __init__(self, checkpoint: Path, args: argparse.Namespace) -> None:
        self._args = args
        self.policy = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=float32)
        self.draft = small_copy(self.policy)
        self._optimizer = AdamW(self.policy.parameters(), args.lr, (0.9, 0.99), weight_decay=0.0)
        self._of_draft = AdamW(self.draft.parameters(), args.draft_lr, weight_decay=0.0)
        save_checkpoint(self.draft, checkpoint.with_name("draft"))
        self.rollout = Rollout(
            str(checkpoint),
            device="cpu",
            dtype="float32",
            num_threads=1,
            max_num_seqs=512,
            kv_cache_bytes=128 << 20,
            components={"draft": str(checkpoint.with_name("draft"))},
            draft_component="draft",
            num_speculative_tokens=DRAFTED,
            speculative_max_num_seqs=512,  # to be counted; where speed matters, some tens
        )

    def begin(self) -> None:
        """Distil the draft model from a policy that does not learn yet."""
        for call in range(self._args.draft_calls):
            self.distil(make_batch(self.sample(-1 - call)[0], self._args.samples, PAD))
        self.rollout.update_weights({"draft": self.draft})

    def sample(self, number: int) -> tuple[list[Sample], float]:
        """Samples, and the share of drafted tokens that were right."""
        a, before = self._args, self.rollout.metrics()
        asked = problems(a.prompts, random.Random(f"{a.seed}-{number}"))
        first = (a.seed * 100_000 + max(number, 0)) * 1000
        found = answers(self.rollout, asked, a.samples, range(first, first + len(asked)))
        now = self.rollout.metrics()
        right = now.spec_accepted_tokens_total - before.spec_accepted_tokens_total
        drafted = now.spec_draft_tokens_total - before.spec_draft_tokens_total
        return found, right / max(drafted, 1)

    def step(self, number: int) -> dict[str, Any]:
        begun = time.perf_counter()
        samples, right = self.sample(number)
        seconds = time.perf_counter() - begun
        batch = make_batch(samples, self._args.samples, PAD)
        with no_grad():
            difference = largest_difference(batch, token_logprobs(self.policy, batch.ids))
        self.learn(batch, number)
        changed: dict[str, nn.Module] = {"policy": self.policy}
        if not self._args.frozen_draft:
            self.distil(batch)
            changed["draft"] = self.draft
        receipt = self.rollout.update_weights(changed)
        return {
            "step": number,
            "correct": sum(s.reward for s in samples),
            "samples": len(samples),
            "tokens": int(batch.mask.sum()),
            "right": right,
            "difference": difference,
            "version": receipt.version,
            "sample_seconds": seconds,
            "sync_seconds": receipt.timings["total"],
            "stall_seconds": receipt.timings["stall"],
        }

    def learn(self, batch: Batch, number: int) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = scheduled_lr(self._args.lr, number, self._args.steps)
        size = -(-len(batch.ids) // self._args.minibatches)
        for first in range(0, len(batch.ids), size):
            part = batch.part(slice(first, first + size))
            loss = clipped_loss(part, token_logprobs(self.policy, part.ids), self._args.clip)
            descend(self.policy, self._optimizer, loss)

    def distil(self, batch: Batch) -> None:
        """One step towards what the policy says now, where samples have tokens."""
        drawn = batch.mask[:, 1:]
        with no_grad():
            wanted = self.policy(batch.ids).logits[:, :-1][drawn].log_softmax(-1)
        found = self.draft(batch.ids).logits[:, :-1][drawn].log_softmax(-1)
        loss = kl_div(found, wanted, reduction="batchmean", log_target=True)
        descend(self.draft, self._of_draft, loss)


def run(args: argparse.Namespace, display: Display, scratch: Path) -> dict[str, Any]:
    prepare(args, display, scratch / "warm")
    set_num_threads(1)
    trainer = DraftTrainer(scratch / "warm", args)
    with trainer.rollout as rollout:
        trainer.begin()
        first, version, rows = evaluate(rollout, args.seed), rollout.weight_version, []
        for number in range(1, args.steps + 1):
            rows.append(trainer.step(number))
            display.add(rows[-1])
        few = -(-args.steps // 10)
        save_checkpoint(trainer.policy, args.output / "checkpoint")
        return {
            "reward_first": first,
            "reward_last": evaluate(rollout, args.seed),
            "steps": args.steps,
            "version_first": version,
            "version_last": rollout.weight_version,
            "right_first": round(sum(row["right"] for row in rows[:few]) / few, 3),
            "right_last": round(sum(row["right"] for row in rows[-few:]) / few, 3),
            "max_logprob_diff": max(row["difference"] for row in rows),
            "weights_equal": rollout.check_weights(args.output / "checkpoint").equal,
        }


def main() -> int:
    defaults = {"output": Path("demo_output/grpo_draft"), "ranks": 1, "service": False}
    args = parse_arguments(__doc__ or "", defaults, FLAGS)
    return drive_alone(args, run)


if __name__ == "__main__":
    sys.exit(main())
