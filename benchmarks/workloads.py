"""The workloads every runner here shares, as token-id prompts; the same seed gives the same ids.

W1 one request; B8 and W2 batches of 8 and 32; W3 eight prompts of eight samples (GRPO groups);
W4 eight prompts of four samples with ragged prompts and long-tailed lengths. For a GPU: D1 to D512
as many decoding sequences, P1 and P64 long prompts, L64 and L256 what RL samples. All greedy.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

# name: prompts, samples of each, prompt tokens, new tokens
UNIFORM = {
    "W1": (1, 1, 128, 128),
    "B8": (8, 1, 64, 128),
    "W2": (32, 1, 64, 128),
    "W3": (8, 8, 256, 128),
    "D1": (1, 1, 64, 256),
    "D32": (32, 1, 64, 256),
    "D256": (256, 1, 64, 256),
    "D512": (512, 1, 64, 256),
    "P1": (1, 1, 1024, 2),
    "P64": (64, 1, 1024, 2),
    "L64": (64, 1, 1024, 8192),
    "L256": (256, 1, 1024, 8192),
}
NAMES = (*UNIFORM, "W4")
FIRST_ID, LAST_ID = 300, 7899  # in every checkpoint's vocabulary, no special token


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to be generated: exactly ``new_tokens`` after ``prompt``."""

    prompt: list[int]
    new_tokens: int


def requests(name: str, seed: int) -> list[Request]:
    """One request per sample; samples of one prompt are neighbours and share the same ids."""
    rng = random.Random(f"{name}-{seed}")
    if name == "W4":
        return [r for _ in range(8) for r in _ragged_group(rng)]
    prompts, samples, length, new_tokens = UNIFORM[name]
    drawn = [_ids(rng, length) for _ in range(prompts)]
    return [Request(prompt, new_tokens) for prompt in drawn for _ in range(samples)]


def parse_names(text: str) -> list[str]:
    """``"W1,B8"`` as names; an unknown one is a ValueError that lists the known."""
    names = text.split(",")
    if unknown := [name for name in names if name not in NAMES]:
        raise ValueError(f"unknown workload {unknown[0]!r}; known: {', '.join(NAMES)}")
    return names


def _ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FIRST_ID, LAST_ID + 1) for _ in range(count)]


def _ragged_group(rng: random.Random) -> list[Request]:
    prompt = _ids(rng, rng.randint(64, 512))
    return [Request(prompt, min(384, int(16 + rng.expovariate(1 / 96)))) for _ in range(4)]
