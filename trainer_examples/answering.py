"""Scored answers from a rollout service; each token knows which weights it was sampled with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from addition_task import MAX_NEW_TOKENS, Problem, problems, reward
from grpo import Sample

from rollout import Rollout, SamplingParams
from rollout.generation import Completion, VersionSpan

EVALUATION_PROBLEMS = 256
EVALUATION_SAMPLES = 4


def answers(
    rollout: Rollout, asked: Sequence[Problem], samples: int, seeds: Sequence[int], **more: Any
) -> list[Sample]:
    """``samples`` scored answers per problem, sampled at temperature 1, one seed each.

    ``more``: of their ``SamplingParams``.
    """
    params = [
        SamplingParams(n=samples, temperature=1.0, max_tokens=MAX_NEW_TOKENS, seed=seed, **more)
        for seed in seeds
    ]
    outputs = rollout.generate([problem.prompt for problem in asked], params)
    return [
        Sample(
            problem.prompt,
            completion.token_ids,
            completion.logprobs.processed,
            reward(problem, completion.token_ids),
            by_token(completion.weight_versions),
            stale(completion, more.get("max_staleness")),
        )
        for problem, output in zip(asked, outputs, strict=True)
        for completion in output.outputs
    ]


def by_token(spans: Sequence[VersionSpan]) -> list[int]:
    """The version of each token, from the spans that cover them."""
    return [span.version for span in spans for _ in range(span.start, span.stop)]


def stale(completion: Completion, most: int | None) -> str:
    """What became of a sample whose oldest token fell more than ``most`` versions behind."""
    if completion.stop_reason == "max_staleness":
        return "aborted" if completion.finish_reason == "abort" else "finished"
    spans = completion.weight_versions
    gone_on = most is not None and spans and spans[-1].version - spans[0].version > most
    return "recomputed" if gone_on else ""


def evaluate(rollout: Rollout, seed: int) -> float:
    """Fraction correct on problems held out by seed, the same at every call."""
    asked = problems(EVALUATION_PROBLEMS, random.Random(f"evaluation-{seed}"))
    found = answers(rollout, asked, EVALUATION_SAMPLES, range(len(asked)))
    return sum(s.reward for s in found) / len(found)
