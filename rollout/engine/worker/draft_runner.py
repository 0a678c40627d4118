"""The draft model of one rank: it guesses tokens that the same step verifies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.engine.steps.draft_batch import DraftBatch
from rollout.engine.worker.kv_cache import KVCache
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model


class DraftRunner:
    """Runs beside the policy, in lockstep on all ranks, over pages of its own under the policy's
    block tables.

    A draft's token is drawn as the policy will draw it: by the same settings, seed and position. So
    the two draw the same wherever their distributions are alike, at any temperature (drafts that
    are the likeliest tokens would be right as often as those are drawn).

    ``to_device`` moves a batch; ``shared`` makes of what rank 0 drew what all ranks have.
    """

    def __init__(
        self,
        kv: KVCache,
        vocabulary: int,
        *,
        is_first: bool,
        to_device: Callable[[ForwardBatch], ForwardBatch],
        shared: Callable[[Tensor], Tensor],
    ) -> None:
        self.kv, self._vocabulary, self._is_first = kv, vocabulary, is_first
        self._to_device, self._shared = to_device, shared

    def complete(
        self,
        model: Model,
        sampler: Sampler | FusedSampler,
        drafts: DraftBatch,
        batch: ForwardBatch,
        sampling: SamplingMetadata,
    ) -> ForwardBatch:
        """``batch``, of the policy's step, with its drafts in place of -1."""
        drawn: list[Tensor] = []
        own = model.config.vocab_size
        for step, one in enumerate(drafts.forwards(drawn, self.kv.shape.block_size)):
            known = replace(one, input_ids=one.input_ids.clamp(max=own - 1))
            logits = model(self._to_device(known), self.kv.layers)
            if len(one.logit_rows):
                rows = drafts.drafting(step).numpy()
                drawn.append(self._draw(sampler, logits, sampling.picked(rows)))
        return replace(batch, input_ids=drafts.fill(batch.input_ids, drawn))

    def _draw(
        self, sampler: Sampler | FusedSampler, logits: Tensor, sampling: SamplingMetadata
    ) -> Tensor:
        """[rows] int64 on the CPU, of the policy's vocabulary, the same on all ranks."""
        drawn = torch.zeros(sampling.num_sampled, dtype=torch.int64)
        if self._is_first:
            missing = self._vocabulary - logits.shape[1]  # releases pad their vocabularies
            logits = torch.nn.functional.pad(logits, (0, missing), value=float("-inf"))
            drawn = sampler.sample(logits, sampling).tokens
        return self._shared(drawn).cpu().clamp(0, self._vocabulary - 1)
