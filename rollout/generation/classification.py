"""What a score head makes of a prompt: a classifier's logits, a reward model's reward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineError, InvalidRequest, RequestAborted
from rollout.generation.embedding import EMBED
from rollout.generation.labels import Labels
from rollout.generation.outputs import NAN_LOGITS, RequestOutput, VersionSpan
from rollout.generation.sampling_params import SamplingParams

POOLINGS = {
    "last": replace(EMBED, pooling="classify"),
    "all": replace(EMBED, pooling="token_classify"),
}


def classify_params(pooling: str) -> SamplingParams:
    """Of a request whose output ``ClassificationOutput.of`` reads."""
    if not isinstance(pooling, str) or pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r:.80}")
    return POOLINGS[pooling]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClassificationOutput:
    """``logits``: [labels] float32, of the prompt's last token; with pooling "all" [tokens,
    labels], of each.

    ``weight_version``: the weights whose forward gave the last row, of the engine's life ``epoch``.
    ``kv_spans``: over the prompt, the weights that computed each position's KV and its logits; more
    than one (``is_mixed``) where an update was committed between two parts of a long prompt.
    """

    request_id: str
    logits: NDArray[np.float32]
    labels: Labels
    prompt_token_ids: list[int]
    weight_version: int
    kv_spans: tuple[VersionSpan, ...]
    num_cached_tokens: int
    epoch: int

    @property
    def probs(self) -> NDArray[np.float32]:
        """Shaped like ``logits``; see ``Labels.probabilities``."""
        return self.labels.probabilities(self.logits)

    @property
    def label(self) -> str:
        """The name of the last token's largest logit, the lower index of a tie."""
        return self.labels.names[int(self.logits.reshape(-1, len(self.labels.names))[-1].argmax())]

    @property
    def reward(self) -> float:
        """The last token's logit, of a model with one label; ``InvalidRequest`` of another."""
        if (count := len(self.labels.names)) != 1:
            raise InvalidRequest(
                f"a reward is the logit of a model with one label; this one has {count}: use "
                "logits or probs"
            )
        return float(self.logits.ravel()[-1])

    @property
    def is_mixed(self) -> bool:
        """Whether weights of several versions had a part in it."""
        return len({span.version for span in self.kv_spans}) > 1

    @classmethod
    def of(cls, output: RequestOutput, pooling: str = "last") -> Self:
        """From the output of a request with ``classify_params(pooling)``; raises for one that was
        cut short.
        """
        [completion], name = output.outputs, f"request {output.request_id!r}"
        if completion.finish_reason == "abort":
            raise RequestAborted(f"{name} was aborted")
        values, labels = output.hidden_state, output.labels
        if labels is None:
            raise InvalidRequest(f"{name}: the service classifies nothing")
        logits = np.asarray(values or (), np.float32)
        if completion.stop_reason == NAN_LOGITS or not len(logits) or np.isnan(logits).any():
            raise EngineError(f"{name} has no logits: the live weights give NaN")
        return cls(
            request_id=output.request_id,
            logits=logits.reshape(-1, len(labels.names)) if pooling == "all" else logits,
            labels=labels,
            prompt_token_ids=output.prompt_token_ids,
            weight_version=completion.kv_spans[-1].version,
            kv_spans=completion.kv_spans,
            num_cached_tokens=output.num_cached_tokens,
            epoch=output.epoch,
        )
