"""One vector for a prompt: the model's last hidden state at the prompt's last token."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from rollout.errors import EngineError, InvalidRequest, RequestAborted
from rollout.generation.outputs import NAN_LOGITS, RequestOutput, VersionSpan
from rollout.generation.sampling_params import SamplingParams

# Its seed is given, so that those of other requests are what they would be without it.
EMBED = SamplingParams(max_tokens=0, seed=0, detokenize=False, hidden_state=True)
POOLINGS = {"last": EMBED, "mean": replace(EMBED, pooling="mean")}


def embed_params(pooling: str) -> SamplingParams:
    """Of a request whose output ``EmbeddingOutput.of`` reads."""
    if not isinstance(pooling, str) or pooling not in POOLINGS:
        raise InvalidRequest(f"pooling must be one of {', '.join(POOLINGS)}, got {pooling!r:.80}")
    return POOLINGS[pooling]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingOutput:
    """``embedding``: [hidden size] float32, of length 1 if normalised.

    ``weight_version``: the weights whose forward gave it, of the engine's life ``epoch``.
    ``kv_spans``: over the prompt, the weights that computed each position's KV; more than one where
    an update was committed between two parts of a long prompt.
    """

    request_id: str
    embedding: list[float]
    prompt_token_ids: list[int]
    weight_version: int
    kv_spans: tuple[VersionSpan, ...]
    num_cached_tokens: int
    epoch: int

    @classmethod
    def of(
        cls, output: RequestOutput, *, normalize: bool, dimensions: int | None = None
    ) -> EmbeddingOutput:
        """From the output of a request with ``EMBED``; raises for one that was cut short.

        ``dimensions``: only the first so many numbers, normalised among themselves.
        """
        [completion], name = output.outputs, f"request {output.request_id!r}"
        if completion.finish_reason == "abort":
            raise RequestAborted(f"{name} was aborted")
        values = output.hidden_state
        if completion.stop_reason == NAN_LOGITS or values is None:
            raise EngineError(f"{name} has no embedding: the live weights give NaN")
        if dimensions is not None:
            if not 1 <= dimensions <= len(values):
                raise InvalidRequest(
                    f"dimensions must be 1 to {len(values)}, which this model has; got {dimensions}"
                )
            values = values[:dimensions]
        length = math.hypot(*values)
        if not 0 < length < math.inf:
            raise EngineError(f"{name} has no embedding: the weights give one of length {length}")
        if normalize:
            values = (np.asarray(values) / length).astype(np.float32).tolist()
        return cls(
            request_id=output.request_id,
            embedding=values,
            prompt_token_ids=output.prompt_token_ids,
            weight_version=completion.kv_spans[-1].version,
            kv_spans=completion.kv_spans,
            num_cached_tokens=output.num_cached_tokens,
            epoch=output.epoch,
        )
