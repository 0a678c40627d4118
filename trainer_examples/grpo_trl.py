"""TRL's GRPOTrainer learns to add, sampling from a rollout service. Neither is changed.

    python trainer_examples/grpo_trl.py [--steps N] [--replicas N]

The trainer is told how to sample by its `rollout_func`: before sampling, the weights are pushed if
a step has changed them; then the prompts go to the service. It needs TRL (`pip install -c
constraints.txt trl`), but no vLLM and no GPU, works with every source that `update_weights` takes
(FSDP, DeepSpeed, PEFT ...), and each update is verified.

The other way is TRL's server mode: `use_vllm=True, vllm_mode="server"` and `vllm_server_base_url`
pointing at `rollout serve --logprobs-mode processed_logprobs`. TRL then also corrects its loss for
the difference between its own logprobs and the service's, which it ignores with a `rollout_func`.
But its trainer must have vLLM installed, and sends weights over NCCL from a CUDA device alone.

Exit status 0: the expected reward rose by a fifth at least (or to 0.9), every step was sampled with
the weights that the step before left, and the service ends with the trainer's weights. Else 1.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # says that rollout_func may change

import torch
from addition_task import (
    MAX_NEW_TOKENS,
    Problem,
    expected_reward,
    make_model,
    make_tokenizer,
    problems,
    save_checkpoint,
    warm_up,
)
from addition_task import reward as reward_of
from datasets import Dataset
from driver import TOO_FEW_SAMPLES, judged, wanted_reward
from processes import DemoError, end_in_order, rollout_service
from trl import GRPOConfig, GRPOTrainer

from rollout import Rollout, SamplingParams


class Sampler:
    """A `rollout_func` that samples from a service; `versions` are what each call sampled with."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout = rollout
        self._pushed = -1
        self.versions: list[int] = []

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """One completion for each prompt; equal prompts come as neighbours.

        Collective where the trainer is distributed: every rank samples, all push together.
        """
        if trainer.state.global_step != self._pushed:
            self._rollout.update_weights(trainer.model_wrapped)
            self._pushed = trainer.state.global_step
        counts = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        args = trainer.args
        params = [
            SamplingParams(n=n, temperature=args.temperature, max_tokens=args.max_completion_length)
            for _, n in counts
        ]
        outputs = self._rollout.generate([prompt for prompt, _ in counts], params)
        found = [(output, sample) for output in outputs for sample in output.outputs]
        self.versions += [span.version for _, s in found for span in s.weight_versions]
        return {
            "prompt_ids": [output.prompt_token_ids for output, _ in found],
            "completion_ids": [sample.token_ids for _, sample in found],
            "logprobs": [sample.logprobs.processed for _, sample in found],
        }


def correct(completion_ids: list[list[int]], a: list[int], b: list[int], **_: Any) -> list[float]:
    """1 for exactly the digits of the sum and the end token, else 0."""
    rows = zip(completion_ids, a, b, strict=True)
    return [reward_of(Problem(first, second), ids) for ids, first, second in rows]


def main() -> int:
    args = parse_arguments()
    end_in_order()
    torch.set_num_threads(os.cpu_count() or 1)
    with tempfile.TemporaryDirectory() as scratch:
        try:
            summary = run(args, Path(scratch))
        except DemoError as error:
            print(f"grpo_trl: {error}", file=sys.stderr)
            return 1
    return judged(summary, [] if args.no_goals else missed_goals(summary))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=32, help="of a step")
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--replicas", type=int, default=1, help="of the engine, updated as one")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--warmup-target", type=float, default=0.4, help="expected reward")
    parser.add_argument("--warmup-steps", type=int, default=600, help="at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-goals", action="store_true", help="exit with 0 whatever was learnt")
    args = parser.parse_args()
    if args.samples < 2:
        parser.error(TOO_FEW_SAMPLES)
    return args


def run(args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    model = make_model(args.seed, args.layers)
    warm_up(model, target=args.warmup_target, seed=args.seed, max_steps=args.warmup_steps)
    save_checkpoint(model, scratch / "warm")
    held_out = problems(512, random.Random("held out"))
    first = expected_reward(model, held_out)
    print(f"expected reward before training: {first:.3f}", flush=True)
    flags = ["--device", "cpu", "--dtype", "float32", "--max-num-seqs", "512", "--num-threads", "1"]
    flags += ["--replicas", str(args.replicas)]
    with (
        rollout_service(scratch / "warm", scratch / "service.log", *flags) as address,
        Rollout.connect(address) as rollout,
    ):
        sampler = Sampler(rollout)
        trainer = make_trainer(args, model, sampler, scratch)
        trainer.train()
        rollout.update_weights(trainer.model_wrapped)
        last = expected_reward(model, held_out)
        return {
            "reward_first": round(first, 4),
            "reward_last": round(last, 4),
            "steps": args.steps,
            "sampled_with": sorted(set(sampler.versions)),
            "weights_equal": rollout.check_weights(model).equal,
        }


def make_trainer(args: argparse.Namespace, model: Any, sampler: Sampler, out: Path) -> GRPOTrainer:
    rng = random.Random(f"train-{args.seed}")
    rows = [
        {"prompt": f"{p.a:02d}+{p.b:02d}=", "a": p.a, "b": p.b}
        for p in problems(args.prompts * args.steps, rng)
    ]
    return GRPOTrainer(
        model=model,
        processing_class=make_tokenizer(),
        reward_funcs=correct,
        rollout_func=sampler,
        train_dataset=Dataset.from_list(rows),
        args=GRPOConfig(
            output_dir=str(out / "trl"),
            use_cpu=True,
            bf16=False,
            max_steps=args.steps,
            learning_rate=args.lr,
            per_device_train_batch_size=args.prompts * args.samples,
            num_generations=args.samples,
            max_completion_length=MAX_NEW_TOKENS,
            temperature=1.0,
            seed=args.seed,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
    )


def missed_goals(summary: dict[str, Any]) -> list[str]:
    first, last = summary["reward_first"], summary["reward_last"]
    wanted = wanted_reward(first, gain=1.2)
    goals = {
        f"the expected reward {last} is at least {wanted:.4f} after {first}": last >= wanted,
        "each step was sampled with its own version": summary["sampled_with"]
        == list(range(1, summary["steps"] + 1)),
        "the service ends with the trainer's weights": summary["weights_equal"],
    }
    return [goal for goal, met in goals.items() if not met]


if __name__ == "__main__":
    sys.exit(main())
