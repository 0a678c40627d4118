"""One of a trainer's ranks: sample, score, learn, push the weights back; step by step.

Started by ``driver.py``, one process per rank. Rank 0 prints one JSON line per event. Other
kinds of trainers override how the model is sharded, pushed, or taught.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from addition_task import PAD, problems, save_checkpoint
from answering import answers, evaluate
from grpo import (
    Batch,
    Sample,
    clipped_loss,
    largest_difference,
    make_batch,
    scheduled_lr,
    token_logprobs,
)
from processes import end_with_parent
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3ForCausalLM

from rollout import Rollout, UpdateReceipt
from rollout.trainer_ops import patch


@dataclass(frozen=True, slots=True)
class Settings:
    """One training run; ``prompts`` are of a whole step, over all ranks."""

    address: str
    checkpoint: str
    output: str
    rendezvous: str  # a file where the ranks find each other
    rank: int
    ranks: int
    steps: int
    prompts: int
    samples: int
    minibatches: int
    lr: float
    clip: float
    seed: int
    deterministic: bool = False  # the engine is, and the trainer runs its ops


class Trainer:
    """A rank's shard of the policy, its optimizer, and its own connection to the service."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        torch.manual_seed(settings.seed)  # whatever is initialised is the same on every rank
        self.model = self.shard(self.start())
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            trained, lr=settings.lr, betas=(0.9, 0.99), weight_decay=0.0
        )
        self.rollout = self.connect()

    def connect(self) -> Any:
        """The service, over a connection of this rank's own."""
        return Rollout.connect(self.settings.address)

    def start(self) -> Qwen3ForCausalLM:
        """The model that the service was started from, whole."""
        model = Qwen3ForCausalLM.from_pretrained(self.settings.checkpoint, dtype=torch.float32)
        if self.settings.deterministic:
            patch(model)
        return model

    def shard(self, model: Qwen3ForCausalLM) -> nn.Module:
        mesh = init_device_mesh("cpu", (self.settings.ranks,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def push(self) -> UpdateReceipt:
        """The weights as they are become the service's next version; collective."""
        return self.rollout.update_weights(self.model)

    def step(self, number: int) -> dict[str, Any]:
        """One step on fresh samples; returns this rank's figures, the same keys on every rank."""
        start = time.perf_counter()
        samples, version = self.sample(number)
        sampled = time.perf_counter()
        largest = self.learn(samples, number)
        learnt = time.perf_counter()
        receipt = self.push()
        return {
            "step": number,
            "sampled_version": version,
            "version": receipt.version,
            "correct": sum(s.reward for s in samples),
            "samples": len(samples),
            "tokens": sum(len(s.answer) for s in samples),
            "difference": largest,
            "sample_seconds": sampled - start,
            "learn_seconds": learnt - sampled,
            "sync_seconds": receipt.timings["total"],
            "stall_seconds": receipt.timings["stall"],
        }

    def sample(self, number: int) -> tuple[list[Sample], int]:
        """This rank's share of the step's prompts, all their samples, and the weights' version."""
        s = self.settings
        drawn = problems(s.prompts, random.Random(f"{s.seed}-{number}"))
        share = list(enumerate(drawn))[s.rank :: s.ranks]
        seeds = [(s.seed * 100_000 + number) * 1000 + index for index, _ in share]
        found = answers(self.rollout, [problem for _, problem in share], s.samples, seeds)
        versions = {version for sample in found for version in sample.versions}
        if len(versions) != 1:
            raise RuntimeError(f"one call's tokens come from several versions: {versions}")
        return found, versions.pop()

    def learn(self, samples: list[Sample], number: int) -> float:
        """Optimizer steps on the samples, a minibatch of whole groups each.

        Returns the largest |trainer logprob - rollout logprob|, taken before the first of them.
        """
        s = self.settings
        with torch.no_grad():
            whole = make_batch(samples, s.samples, PAD)
            largest = largest_difference(whole, token_logprobs(self.model, whole.ids))
        for group in self.optimizer.param_groups:
            group["lr"] = scheduled_lr(s.lr, number, s.steps)
        size = len(samples) // s.minibatches
        for first in range(0, len(samples), size):
            self.descend(make_batch(samples[first : first + size], s.samples, PAD))
        return largest

    def descend(self, batch: Batch) -> None:
        loss = clipped_loss(batch, token_logprobs(self.model, batch.ids), self.settings.clip)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.clip_gradients()
        self.optimizer.step()

    def clip_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def evaluate(self) -> float:
        return evaluate(self.rollout, self.settings.seed)

    def holds(self, checkpoint: str) -> bool:
        """Whether the engine's weights are those of ``checkpoint``; of use on rank 0 alone."""
        return self.settings.rank == 0 and self.rollout.check_weights(checkpoint).equal

    def whole(self) -> Qwen3ForCausalLM | None:
        """The whole model on rank 0; collective."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(self.model, options=options)
        if self.settings.rank != 0:
            return None
        model = self.start()
        model.load_state_dict(state)
        return model

    def save(self) -> None:
        """Rank 0 writes the whole model as a checkpoint; collective."""
        model = self.whole()
        if model is not None:
            save_checkpoint(model, Path(self.settings.output))


def total(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures of all ranks: counts are added, times and differences are the largest."""
    added = ("correct", "samples", "tokens")
    largest = [key for key in figures if key not in added]
    sums = torch.tensor([float(figures[key]) for key in added], dtype=torch.float64)
    tops = torch.tensor([float(figures[key]) for key in largest], dtype=torch.float64)
    dist.all_reduce(sums)
    dist.all_reduce(tops, op=dist.ReduceOp.MAX)
    merged = dict(zip(added, sums.tolist(), strict=True))
    merged |= dict(zip(largest, tops.tolist(), strict=True))
    return {key: int(v) if key in ("step", "version") else v for key, v in merged.items()}


def run(settings: Settings, kind: type[Trainer]) -> None:
    trainer = kind(settings)
    first = trainer.rollout.weight_version
    report(settings, {"event": "start", "reward": trainer.evaluate(), "version": first})
    for number in range(1, settings.steps + 1):
        figures = total(trainer.step(number))
        report(settings, {"event": "step", **figures})
    dist.barrier()
    reward = trainer.evaluate()
    trainer.save()
    equal = trainer.holds(settings.output)
    report(settings, {"event": "end", "reward": reward, "equal": equal})
    trainer.rollout.shutdown()


def report(settings: Settings, event: dict[str, Any]) -> None:
    if settings.rank == 0:
        print(json.dumps(event), flush=True)


def main(kind: type[Trainer] = Trainer) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=json.loads, help="Settings as a JSON object")
    settings = Settings(**parser.parse_args().settings)
    end_with_parent()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{settings.rendezvous}",
        rank=settings.rank,
        world_size=settings.ranks,
        timeout=timedelta(seconds=60),
    )
    try:
        run(settings, kind)
    finally:
        dist.destroy_process_group()
