"""The prediction head of one rank, as a draft model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from rollout.engine.memory import to_device
from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.engine.worker.draft_runner import DraftParts, DraftRunner
from rollout.models.forward import ForwardBatch, HiddenPages
from rollout.models.model import Model
from rollout.models.prediction.head import HeadBehind


class HeadRunner(DraftRunner):
    """Reads in the first pass of a step what the policy has made of the known tokens (``hidden``:
    those pages), in each later one what the head has made of its drafts.
    """

    def __init__(
        self, own: DraftParts, reads: tuple[int, ...], hidden: Callable[[], HiddenPages]
    ) -> None:
        super().__init__(own)
        self.reads, self._hidden = reads, hidden

    def _run(
        self,
        model: Model,
        sampler: Sampler | FusedSampler,
        batch: ForwardBatch,
        sampling: SamplingMetadata,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        own, graphs, count = self._own.part(model), self.graphs, len(batch.logit_rows)
        assert isinstance(own, HeadBehind)
        if before is None:
            pages = self._hidden().pages
            before = own.head.first(pages[to_device(batch.slot_mapping, pages.device)])
        # Of those that are drafted for still.
        batch = replace(batch, before=before[: len(batch.input_ids)])
        found = graphs.draw(model, batch, sampling) if self._own.is_first else None
        if found is not None:
            return found.tokens.clone(), graphs.left(count)
        states = graphs.hidden_states(model, batch)
        if states is None:
            logits = graphs.logits(model, batch)
            if logits is not None:
                return self._drawn(logits, sampler, sampling), graphs.left(count)
            states = own.hidden_states(self._own.to_device(batch), self.kv.layers)
        return self._drawn(own.logits(states), sampler, sampling), states
