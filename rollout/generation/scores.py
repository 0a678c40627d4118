"""Logprobs of given tokens, packed: what scoring brings, and what ``Rollout.score`` returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from rollout.errors import EngineError, InvalidRequest, RequestAborted
from rollout.generation.outputs import NAN_LOGITS, RequestOutput, VersionSpan
from rollout.generation.sampling_params import SamplingParams


def score_params(top_logprobs: int, start: int, temperature: float) -> SamplingParams:
    """Of a request whose output ``ScoreOutput.of`` reads: no token is drawn."""
    if top_logprobs is None:
        raise InvalidRequest("top_logprobs must be 0 or more, got None")
    try:
        return SamplingParams(
            max_tokens=0,
            seed=0,  # given, so that those of other requests are what they would be without it
            detokenize=False,
            prompt_logprobs=top_logprobs,
            prompt_logprobs_start=start,
            prompt_temperature=temperature,
        )
    except InvalidRequest as error:  # in the words of who scores
        text = str(error).replace("prompt_temperature", "temperature")
        text = text.replace("prompt_logprobs", "top_logprobs").replace(", or None", "")
        raise InvalidRequest(text) from None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoreOutput:
    """``T`` tokens of a sequence, from position ``start`` on, each given those before it.

    ``logprobs`` [T] float32: of ``token_ids`` [T] int64, natural logarithms at the temperature that
    was asked for. ``top_ids`` [T, k] int32 and ``top_logprobs`` [T, k] float32: the k most likely
    tokens, best first, the lower id of a tie; the scored token is among them where it is one.
    ``weight_versions``: spans over the T tokens, the weights whose forward gave the logits.
    ``kv_spans``: over the positions of the sequence that were computed, the weights of their KV; of
    the engine's life ``epoch``.
    """

    request_id: str
    start: int
    token_ids: NDArray[np.int64]
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]
    top_logprobs: NDArray[np.float32]
    weight_versions: tuple[VersionSpan, ...]
    kv_spans: tuple[VersionSpan, ...]
    num_cached_tokens: int
    epoch: int

    @property
    def rest_logprobs(self) -> NDArray[np.float32]:
        """[T]: log of the mass beyond the k tokens, 0 where k is 0; minus infinity for none left.

        The mass is right to about 1e-6 of the whole, as float32 logprobs are.
        """
        mass = np.exp(self.top_logprobs.astype(np.float64)).sum(-1)
        with np.errstate(divide="ignore"):
            rest: NDArray[np.float32] = np.log1p(-np.minimum(mass, 1.0)).astype(np.float32)
        return rest

    @property
    def is_mixed(self) -> bool:
        """Whether weights of several versions had a part in it, the KV of its context included."""
        return len({span.version for span in (*self.kv_spans, *self.weight_versions)}) > 1

    @property
    def weight_version(self) -> int:
        """The weights of the last token's logits; of all of it, unless ``is_mixed``."""
        return self.weight_versions[-1].version

    @classmethod
    def of(cls, output: RequestOutput) -> Self:
        """From the output of a request with ``score_params``; raises for one that was cut short."""
        [completion], name = output.outputs, f"request {output.request_id!r}"
        if completion.finish_reason == "abort":
            raise RequestAborted(f"{name} was aborted")
        scores = output.scores
        if completion.stop_reason == NAN_LOGITS or scores is None:
            raise EngineError(f"{name} has no scores: the live weights give NaN")
        first, count = scores.start, len(scores.logprobs)
        return cls(
            request_id=output.request_id,
            start=first,
            token_ids=np.asarray(output.prompt_token_ids[first : first + count], np.int64),
            logprobs=scores.logprobs,
            top_ids=scores.top_ids,
            top_logprobs=scores.top_logprobs,
            weight_versions=_shifted(completion.kv_spans, first - 1, count),
            kv_spans=completion.kv_spans,
            num_cached_tokens=output.num_cached_tokens,
            epoch=output.epoch,
        )


def scored_rows(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]] | None,
    last_n: int | None,
) -> tuple[list[list[int]], list[int]]:
    """Whole sequences, and from which token on each is scored; ``InvalidRequest`` names the row."""
    if last_n is not None and (type(last_n) is not int or last_n < 1):
        raise InvalidRequest(f"last_n must be at least 1, or None for all, got {last_n!r:.80}")
    if completions is not None and len(completions) != len(prompts):
        raise InvalidRequest(
            f"{len(completions)} completions for {len(prompts)} prompts: give one for each"
        )
    rows: list[list[int]] = []
    starts: list[int] = []
    for number, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidRequest(
                f"prompt {number} is empty: the first token of a sequence has no logprob"
            )
        if completions is not None and not completions[number]:
            raise InvalidRequest(f"completion {number} is empty: there is nothing to score")
        row = [*prompt, *([] if completions is None else completions[number])]
        start = 1 if completions is None else len(prompt)
        if len(row) < 2:
            raise InvalidRequest(f"prompt {number} has one token: there is nothing to score")
        starts.append(start if last_n is None else max(start, len(row) - last_n))
        rows.append(row)
    return rows, starts


def _shifted(spans: Sequence[VersionSpan], first: int, count: int) -> tuple[VersionSpan, ...]:
    """The logits of a token are those of the position before it, made with that one's KV."""
    clipped = (
        VersionSpan(s.version, max(s.start - first, 0), min(s.stop - first, count)) for s in spans
    )
    return tuple(span for span in clipped if span.start < span.stop)
