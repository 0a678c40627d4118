"""A prediction head that is run over sequences, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from rank_threads import Session
from torch import Tensor

from rollout.models.causal_lm import CausalLM
from rollout.models.prediction.head import PredictionHead


def run_head(
    policy: CausalLM,
    head: PredictionHead,
    following: Sequence[Sequence[int]],
    read: Sequence[Tensor],
    steps: Sequence[Sequence[int]],
) -> tuple[list[Tensor], list[Tensor]]:
    """States and logits of each sequence; ``steps``: how many of its tokens go at a time.

    ``following``: of each sequence the tokens behind its positions; ``read``: the policy's states
    there, as its pages have them.
    """
    session = Session(head, following)
    states: list[list[Tensor]] = [[] for _ in following]
    for counts in steps:
        at = list(session.done)
        batch = session.batch(counts)
        parts = [h[a : a + n] for h, a, n in zip(read, at, counts, strict=True)]
        found = head.hidden_states(policy, batch, session.kv, head.first(torch.cat(parts)))
        for each, part in zip(states, found.split(list(counts)), strict=True):
            each.append(part)
    whole = [torch.cat(parts) for parts in states]
    return whole, [head.logits(policy, each) for each in whole]


def check_close(found: Sequence[Tensor], wanted: Any) -> None:
    """As far as both are finite, and infinite in the same places."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        there = theirs.isfinite()
        assert torch.equal(ours.isfinite(), there)
        assert (ours[there] - theirs[there]).abs().max() < 1e-5 * theirs[there].abs().max()
