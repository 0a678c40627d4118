"""A prediction head that is run over sequences, chunk by chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import torch
from rank_threads import Session
from torch import Tensor

from rollout.models.causal_lm import CausalLM
from rollout.models.forward import ForwardBatch
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


@dataclass(slots=True)
class Watched:
    """The passes of an engine's heads: each one's batch, what was before it, and its states."""

    passes: list[tuple[ForwardBatch, Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def by(cls, monkeypatch: pytest.MonkeyPatch) -> Self:
        seen, run = cls(), PredictionHead.hidden_states

        def watched(
            self: PredictionHead, policy: Any, batch: Any, kv: Any, before: Tensor
        ) -> Tensor:
            given, found = before.clone(), run(self, policy, batch, kv, before)
            seen.passes.append((batch, given, found))
            return found

        monkeypatch.setattr(PredictionHead, "hidden_states", watched)
        return seen

    def check(self, ids: Tensor, first: Tensor, wanted: Tensor, known: int, near: float) -> None:
        """Of the drafts for ``ids``: the first pass of a step reads ``first`` of its positions and
        the tokens behind them, and makes ``wanted``; later ones read what was made before. All
        positions are read but the ``known`` ones, and the last ones.
        """
        read, last, later = set[int](), None, 0
        for batch, before, found in self.passes:
            at = batch.positions
            if last is not None and torch.equal(before, last):
                later += 1
            else:
                read |= set(at.tolist())
                assert torch.equal(batch.input_ids, ids[at + 1])
                assert torch.allclose(before, first[at], atol=near)
                assert torch.allclose(found, wanted[at[batch.logit_rows]], atol=near)
            last = found
        assert read >= set(range(known, len(ids) - 10))
        assert later
        self.passes.clear()


def check_close(found: Sequence[Tensor], wanted: Any) -> None:
    """As far as both are finite, and infinite in the same places."""
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.shape == theirs.shape
        there = theirs.isfinite()
        assert torch.equal(ours.isfinite(), there)
        assert (ours[there] - theirs[there]).abs().max() < 1e-5 * theirs[there].abs().max()
