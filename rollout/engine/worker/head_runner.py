"""The prediction head of one rank, as a draft model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rollout.engine.sampling.fused_sampler import FusedSampler
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import Sampler
from rollout.engine.worker.draft_runner import DraftRunner
from rollout.models.causal_lm import CausalLM
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model
from rollout.models.prediction_head import PredictionHead


class HeadRunner(DraftRunner):
    """Reads in the first pass of a step what the policy has made of the known tokens (``hidden``:
    those pages, [slots + 1, hidden size]), in each later one what the head has made of its drafts.
    """

    def __init__(self, *args: Any, hidden: Callable[[], Tensor], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._hidden = hidden

    def _run(
        self,
        model: Model,
        sampler: Sampler | FusedSampler,
        batch: ForwardBatch,
        sampling: SamplingMetadata,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        head, policy = self._part(model), model.policy
        assert isinstance(head, PredictionHead)
        assert isinstance(policy, CausalLM)
        moved = self._to_device(batch)
        if before is None:
            before = self._hidden()[moved.slot_mapping]
        else:
            before = before[: len(batch.input_ids)]  # of those that are drafted for still
        states = head.hidden_states(policy, moved, self.kv.layers, before)
        return self._drawn(head.logits(policy, states), sampler, sampling), states
