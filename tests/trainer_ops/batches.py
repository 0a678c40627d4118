"""Sequences that an engine sampled, and the batches that a trainer makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollout import RequestOutput, Rollout, SamplingParams

LENGTHS = (3, 17, 9, 33)  # of prompts: beside, and across, the engine's blocks
TEMPERATURES = (1.0, 0.7, 1.3, 1.0)
NEW = 12


def deterministic_engine(path: Path, ranks: int = 1, **settings: Any) -> Rollout:
    return Rollout(
        str(path),
        deterministic=True,
        device="cpu",
        num_threads=1,
        tensor_parallel_size=ranks,
        max_model_len=128,
        kv_cache_bytes=1 << 24,
        skip_tokenizer_init=True,
        **settings,
    )


@dataclass(frozen=True)
class Sampled:
    """One sampled sequence with the engine's logprobs of its new tokens."""

    ids: list[int]
    start: int  # of what was sampled
    raw: Tensor
    processed: Tensor
    temperature: float

    @classmethod
    def of(cls, prompt: list[int], out: RequestOutput, temperature: float) -> Sampled:
        found = out.outputs[0]
        scores = found.logprobs
        ids = prompt + list(found.token_ids)
        raw, processed = (torch.tensor(x) for x in (scores.raw, scores.processed))
        return cls(ids, len(prompt), raw, processed, temperature)


def sample(engine: Rollout, seed: int = 0) -> list[Sampled]:
    rng = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(3, 320, (n,), generator=rng).tolist() for n in LENGTHS]
    params = [
        SamplingParams(temperature=t, max_tokens=NEW, seed=100 * seed + i, ignore_eos=True)
        for i, t in enumerate(TEMPERATURES)
    ]
    outs = engine.generate(prompts, params)
    return [Sampled.of(*each) for each in zip(prompts, outs, TEMPERATURES, strict=True)]


def padded(sequences: list[Sampled], *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids and mask [sequences, longest]; padding holds a token of the vocabulary."""
    width = max(len(s.ids) for s in sequences)
    ids, mask = torch.full((len(sequences), width), 5), torch.zeros(len(sequences), width).long()
    for row, s in enumerate(sequences):
        at = slice(width - len(s.ids), width) if left else slice(0, len(s.ids))
        ids[row, at], mask[row, at] = torch.tensor(s.ids), 1
    return ids, mask


def packed(sequences: list[Sampled]) -> tuple[Tensor, Tensor]:
    """Ids and positions of all sequences in one row."""
    ids = torch.tensor([[i for s in sequences for i in s.ids]])
    return ids, torch.cat([torch.arange(len(s.ids)) for s in sequences])[None]


def temperatures(sequences: list[Sampled]) -> Tensor:
    return torch.tensor([s.temperature for s in sequences])


def new_tokens(logprobs: Tensor, mask: Tensor, sequences: list[Sampled]) -> list[Tensor]:
    """Of a padded batch, those of what was sampled."""
    pairs = zip(logprobs.detach(), mask.bool(), sequences, strict=True)
    return [row[real][s.start :] for row, real, s in pairs]
