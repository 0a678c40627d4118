"""Nouns of generation that cross a process: what is asked for, and what comes back."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from rollout.errors import InvalidRequest

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax
MAX_SAMPLES = 16384
FINISH_REASONS = ("stop", "length", "abort")
_NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued; names, defaults and bounds are vLLM's.

    Applied to float32 logits in this order: min_tokens mask, logit_bias, penalties (repetition
    over prompt and output, presence and frequency over output), temperature, min_p, top_k, top_p,
    then a draw from a counter-based generator keyed by (seed, sample index, position).

    ``n`` samples share the prompt. ``temperature`` in [0, inf), below 1e-5 is greedy. ``top_k`` 0
    or -1 is off. ``logprobs``: how many alternatives per token in ``Logprobs.top`` (0: only the
    sampled token's, None: no alternatives; the sampled token's three logprobs always come).
    ``prompt_logprobs`` likewise for the prompt. ``max_tokens`` None: up to ``max_model_len``.
    ``seed`` None: the engine draws one per request and sample.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    max_tokens: int | None = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, _as_tuple(name, getattr(self, name)))
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)
        self._check_ranges()
        self._check_contradictions()

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from plain values; an unknown key is refused with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise InvalidRequest(f"unknown sampling parameter {key!r}{hint}")
        return cls(**values)

    def _check_ranges(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name} must be {rule}, got {getattr(self, name)!r}")

        for name in _NUMBERS:
            value = getattr(self, name)
            need(isinstance(value, Real) and not isinstance(value, bool), name, "a number")
        need(is_int(self.n) and 1 <= self.n <= MAX_SAMPLES, "n", f"in 1..{MAX_SAMPLES}")
        need(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "at least 0")
        need(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        need(is_int(self.top_k) and self.top_k >= 0, "top_k", "at least 1, or 0 or -1 for off")
        need(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        need(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        need(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        need(
            math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0,
            "repetition_penalty",
            "positive",
        )
        need(is_int(self.min_tokens) and self.min_tokens >= 0, "min_tokens", "at least 0")
        limit = self.max_tokens
        need(limit is None or (is_int(limit) and limit >= 1), "max_tokens", "at least 1, or None")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            need(count is None or (is_int(count) and count >= 0), name, "at least 0, or None")
        need(self.seed is None or is_int(self.seed), "seed", "an integer or None")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        need(all(map(is_int, self.stop_token_ids)), "stop_token_ids", "integers")
        finite = all(map(math.isfinite, (self.logit_bias or {}).values()))
        need(finite, "logit_bias", "finite for every token")

    def _check_contradictions(self) -> None:
        if self.greedy and self.n > 1:
            raise InvalidRequest(f"n must be 1 when using greedy sampling, got {self.n}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids instead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt, tokenised, with how to continue it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Positions ``start <= i < stop`` were computed by the weights of ``version``."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Per output token, float32 natural logarithms.

    ``raw``: log-softmax of the model's logits. ``processed``: of the distribution that was sampled
    (renormalised over the kept tokens). ``log_kept_mass``: log of the tempered probability mass
    that the filters kept, so ``processed = log_softmax(logits / T) - log_kept_mass`` where no
    penalty or bias applies. ``top``: for each position the ``logprobs`` most likely tokens by raw
    logprob, and the sampled one; None when not asked for.
    """

    raw: list[float]
    processed: list[float]
    log_kept_mass: list[float]
    top: list[dict[int, float]] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sample. ``token_ids`` keep a stop token or string that ``text`` leaves out.

    ``finish_reason``: None while running, "stop" (``stop_reason`` None for the end-of-sequence
    token, an int for a stop id, a str for a stop string), "length" or "abort".
    ``weight_versions``: spans over output tokens, the weights whose forward gave the logits.
    ``kv_spans``: spans over all positions (prompt and output), the weights that computed the KV.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: Logprobs
    cumulative_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None
    weight_versions: tuple[VersionSpan, ...]
    kv_spans: tuple[VersionSpan, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and all its samples so far; ``epoch`` says in which engine life versions count.

    ``prompt_logprobs``: None, or one entry per prompt token: None for the first, then the raw
    logprobs of that token and of the most likely ones.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[Completion]
    finished: bool
    num_cached_tokens: int
    epoch: int = 0


PromptInput = str | Sequence[int]


def is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    try:
        return tuple(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be a list, got {value!r}") from None


def _as_bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError):
        raise InvalidRequest(f"logit_bias must map token ids to numbers, got {value!r}") from None
