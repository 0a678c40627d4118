"""Trainer jobs, and what an engine says, for the end-to-end tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer_processes import Job

from rollout import Rollout, SamplingParams

PROMPTS = [[(7 * i + k) % 300 for i in range(70 + k)] for k in range(4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.9, seed=5, max_tokens=6, ignore_eos=True)


def trainer_job(kind: str, world: int, path: Path, log: Path) -> Job:
    return Job(Path(__file__).parent / "trainer_job.py", world, log, kind, str(path))


def start(path: Path, tp: int, **settings: Any) -> Rollout:
    return Rollout(
        str(path), tensor_parallel_size=tp, device="cpu", num_threads=1, num_kv_blocks=256,
        max_model_len=512, timeout=10.0, **{"dtype": "float32", **settings},
    )  # fmt: skip


def outcome(rollout: Rollout) -> list[Any]:
    """Tokens and exact logprobs of greedy and sampled continuations, from an empty cache."""
    rollout.reset_prefix_cache()
    rows = []
    for params in (GREEDY, SAMPLED):
        for output in rollout.generate(PROMPTS, params):
            sample = output.outputs[0]
            rows.append((sample.token_ids, sample.logprobs.raw, sample.logprobs.processed))
    return rows


def fill_prefix_cache(rollout: Rollout) -> None:
    rollout.generate(PROMPTS, GREEDY)
    assert rollout.generate(PROMPTS, GREEDY)[0].num_cached_tokens > 0
