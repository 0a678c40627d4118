"""Group-relative policy optimisation, in the few functions the demo needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rollout.trainer_ops import logprobs_of as sampled_logprobs


@dataclass(frozen=True, slots=True)
class Sample:
    """One sampled answer; ``logprobs`` are the rollout's processed ones, one per answer token.

    ``versions``: of the weights that gave each token's logits, where that matters. ``stale``: what
    ``max_staleness`` made of it: "recomputed", "finished" or "aborted", where it did anything.
    """

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    reward: float
    versions: Sequence[int] = ()
    stale: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether it was ended for its age: its reward would be that of half an answer."""
        return self.stale in ("finished", "aborted")


@dataclass(frozen=True, slots=True)
class Batch:
    """Right-padded samples. ``mask`` is True where ``ids`` holds a sampled token."""

    ids: Tensor  # [samples, tokens] int64
    mask: Tensor  # [samples, tokens] bool
    logprobs: Tensor  # [samples, tokens] float32, 0 outside the mask
    advantages: Tensor  # [samples, 1] float32

    def part(self, rows: slice) -> Batch:
        """Some of the samples."""
        return Batch(self.ids[rows], self.mask[rows], self.logprobs[rows], self.advantages[rows])


def advantages(rewards: Sequence[float], group: int) -> Tensor:
    """Reward minus its group's mean, over its group's deviation; ``group`` neighbours at a time."""
    grouped = torch.tensor(rewards).view(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    return (centred / (grouped.std(1, keepdim=True, correction=0) + 1e-4)).flatten()


def make_batch(samples: Sequence[Sample], group: int, pad: int) -> Batch:
    """``samples`` of one prompt are neighbours, ``group`` of them each."""
    width = max(len(s.prompt) + len(s.answer) for s in samples)
    ids = torch.full((len(samples), width), pad)
    mask = torch.zeros(len(samples), width, dtype=torch.bool)
    logprobs = torch.zeros(len(samples), width)
    for row, s in enumerate(samples):
        start, stop = len(s.prompt), len(s.prompt) + len(s.answer)
        ids[row, :stop] = torch.tensor(s.prompt + s.answer)
        mask[row, start:stop] = True
        logprobs[row, start:stop] = torch.tensor(s.logprobs)
    return Batch(ids, mask, logprobs, advantages([s.reward for s in samples], group)[:, None])


def token_logprobs(model: nn.Module, ids: Tensor) -> Tensor:
    """Log-probability of each token given those before it, [samples, tokens]; 0 for the first."""
    return logprobs_of(model(ids).logits, ids)


def logprobs_of(logits: Tensor, ids: Tensor) -> Tensor:
    """The same, from the logits [samples, tokens, vocabulary] at each position."""
    logprobs = sampled_logprobs(logits[:, :-1], ids[:, 1:])
    return torch.cat([torch.zeros_like(logprobs[:, :1]), logprobs], dim=1)


def clipped_loss(batch: Batch, logprobs: Tensor, clip: float) -> Tensor:
    """PPO's clipped objective against the probabilities the tokens were sampled with.

    Summed over all sampled tokens and divided by their number, so that long and short answers'
    tokens weigh the same.
    """
    ratio = (logprobs - batch.logprobs).masked_fill(~batch.mask, 0.0).exp()
    gain = torch.minimum(
        ratio * batch.advantages, ratio.clamp(1 - clip, 1 + clip) * batch.advantages
    )
    return -(gain * batch.mask).sum() / batch.mask.sum()


def descend(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One step of a model that one process has whole, its gradient cut to a norm of 1."""
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def largest_difference(batch: Batch, logprobs: Tensor) -> float:
    """Largest |trainer logprob - rollout logprob| over the sampled tokens."""
    return float((logprobs.detach() - batch.logprobs).abs()[batch.mask].max())


def scheduled_lr(peak: float, step: int, steps: int, rise: int = 10, last: float = 0.1) -> float:
    """Rises over the first ``rise`` steps, while AdamW's moments settle, and falls to ``last``.

    ``step`` counts from 1 to ``steps``; the result is a fraction of ``peak``, linear in both parts.
    """
    done = (step - 1) / max(1, steps)
    return peak * min(1.0, step / rise) * (1 - (1 - last) * done)
