"""The prediction head of one rank, as a draft model."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.engine.worker.draft_runner import DraftParts, DraftRunner
from rollout.models.causal_lm import CausalLM
from rollout.models.forward import ForwardBatch, HiddenPages
from rollout.models.model import Model
from rollout.models.prediction.head import PredictionHead


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
        head, policy = self._own.part(model), model.policy
        assert isinstance(head, PredictionHead)
        assert isinstance(policy, CausalLM)
        moved = self._own.to_device(batch)
        if before is None:
            before = head.first(self._hidden().pages[moved.slot_mapping])
        else:
            before = before[: len(batch.input_ids)]  # of those that are drafted for still
        states = head.hidden_states(policy, moved, self.kv.layers, before)
        return self._drawn(head.logits(policy, states), sampler, sampling), states
