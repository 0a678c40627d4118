"""The draft model of one rank: it guesses tokens that the same step verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.engine.steps.draft_batch import DraftBatch
from rollout.engine.worker.graphs.graph_sets import GraphSets, Part
from rollout.engine.worker.kv_cache import KVCache
from rollout.models.causal_lm import CausalLM
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftParts:
    """What a rank drafts with: the pages and graphs of ``part`` of an instance.

    ``vocabulary``: the policy's. ``to_device`` moves a batch; ``shared`` makes of what rank 0 drew
    what all ranks have.
    """

    part: Callable[[Model], Part]
    kv: KVCache
    graphs: GraphSets
    vocabulary: int
    is_first: bool  # of the ranks
    to_device: Callable[[ForwardBatch], ForwardBatch]
    shared: Callable[[Tensor], Tensor]


class DraftRunner:
    """Runs its part of the instance whose policy runs the step, in lockstep on all ranks, over
    pages of its own under the policy's block tables.

    A draft's token is drawn as the policy will draw it: by the same settings, seed and position. So
    the two draw the same wherever their distributions are alike, at any temperature (drafts that
    are the likeliest tokens would be right as often as those are drawn).

    ``reads``: which of the policy's states, as ``HiddenPages.layers``; None: no states.
    """

    reads: tuple[int, ...] | None = None

    def __init__(self, own: DraftParts) -> None:
        self.kv, self.graphs, self._own = own.kv, own.graphs, own

    def complete(
        self,
        model: Model,
        sampler: Sampler | FusedSampler,
        drafts: DraftBatch,
        batch: ForwardBatch,
        sampling: SamplingMetadata,
    ) -> ForwardBatch:
        """``batch`` (CPU), of the policy's step, with its drafts in place of -1."""
        drawn: list[Tensor] = []
        made: Tensor | None = None
        largest = self._own.part(model).config.vocab_size - 1
        for step, one in enumerate(drafts.forwards(drawn, self.kv.shape.block_size)):
            known = replace(one, input_ids=one.input_ids.clamp(max=largest))
            own = sampling.picked(drafts.drafting(step).numpy())
            tokens, made = self._run(model, sampler, known, own, made)
            drawn.append(self._own.shared(tokens).clamp(0, self._own.vocabulary - 1))
        return replace(batch, input_ids=drafts.fill(batch.input_ids, drawn))

    def _run(
        self,
        model: Model,
        sampler: Sampler | FusedSampler,
        batch: ForwardBatch,
        sampling: SamplingMetadata,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """[rows] int64, what rank 0 draws, of the others anything; and what the next run of this
        step is given as ``before``.
        """
        part, graphs = self._own.part(model), self.graphs
        found = graphs.draw(model, batch, sampling) if self._own.is_first else None
        if found is not None:
            return found.tokens.clone(), None  # the next run writes there
        states, logits = graphs.hidden_states(model, batch), None
        if states is not None and isinstance(part, CausalLM):
            logits = part.logits(states)
        else:
            logits = graphs.logits(model, batch)
        if logits is None:
            logits = part(self._own.to_device(batch), self.kv.layers)
        return self._drawn(logits, sampler, sampling), None

    def _drawn(
        self, logits: Tensor, sampler: Sampler | FusedSampler, sampling: SamplingMetadata
    ) -> Tensor:
        if not (self._own.is_first and sampling.num_sampled):
            return torch.zeros(sampling.num_sampled, dtype=torch.int64)
        if missing := self._own.vocabulary - logits.shape[1]:  # releases pad their vocabularies
            logits = pad(logits, (0, missing), value=float("-inf"))
        return sampler.sample(logits, sampling).tokens
