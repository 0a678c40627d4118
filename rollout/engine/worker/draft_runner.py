"""The draft model of one rank: it guesses tokens that the same step verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.engine.steps.draft_batch import DraftBatch
from rollout.engine.worker.graph_sets import GraphSets
from rollout.engine.worker.kv_cache import KVCache
from rollout.models.causal_lm import CausalLM
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model


class DraftRunner:
    """Runs ``part`` of the instance whose policy runs the step, in lockstep on all ranks, over
    pages of its own under the policy's block tables.

    A draft's token is drawn as the policy will draw it: by the same settings, seed and position. So
    the two draw the same wherever their distributions are alike, at any temperature (drafts that
    are the likeliest tokens would be right as often as those are drawn).

    ``vocabulary``: the policy's. ``to_device`` moves a batch; ``shared`` makes of what rank 0 drew
    what all ranks have.
    """

    def __init__(
        self,
        part: Callable[[Model], Model],
        kv: KVCache,
        graphs: GraphSets,
        vocabulary: int,
        *,
        is_first: bool,
        to_device: Callable[[ForwardBatch], ForwardBatch],
        shared: Callable[[Tensor], Tensor],
    ) -> None:
        self.kv, self.graphs, self._part = kv, graphs, part
        self._vocabulary, self._is_first = vocabulary, is_first
        self._to_device, self._shared = to_device, shared

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
        largest = self._part(model).config.vocab_size - 1
        for step, one in enumerate(drafts.forwards(drawn, self.kv.shape.block_size)):
            known = replace(one, input_ids=one.input_ids.clamp(max=largest))
            own = sampling.picked(drafts.drafting(step).numpy())
            tokens, made = self._run(model, sampler, known, own, made)
            drawn.append(self._shared(tokens).clamp(0, self._vocabulary - 1))
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
        part, graphs = self._part(model), self.graphs
        found = graphs.draw(model, batch, sampling) if self._is_first else None
        if found is not None:
            return found.tokens.clone(), None  # the next run writes there
        states, logits = graphs.hidden_states(model, batch), None
        if states is not None and isinstance(part, CausalLM):
            logits = part.logits(states)
        else:
            logits = graphs.logits(model, batch)
        if logits is None:
            logits = part(self._to_device(batch), self.kv.layers)
        return self._drawn(logits, sampler, sampling), None

    def _drawn(
        self, logits: Tensor, sampler: Sampler | FusedSampler, sampling: SamplingMetadata
    ) -> Tensor:
        if not (self._is_first and sampling.num_sampled):
            return torch.zeros(sampling.num_sampled, dtype=torch.int64)
        if missing := self._vocabulary - logits.shape[1]:  # releases pad their vocabularies
            logits = pad(logits, (0, missing), value=float("-inf"))
        return sampler.sample(logits, sampling).tokens
