"""Nouns of generation that cross a process: what is asked for, and what comes back."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from rollout.errors import InvalidRequest

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax
MAX_SAMPLES = 16384
MAX_STOPS = 256  # stop strings, each of at most MAX_STOP_CHARS characters
MAX_STOP_CHARS = 4096
MAX_TOKEN_RULES = 1 << 16  # entries of stop_token_ids, and of logit_bias
MAX_TOP_K = (1 << 31) - 1
MAX_INT = (1 << 63) - 1  # of whatever else is a whole number: what our gRPC fields hold
FINISH_REASONS = ("stop", "length", "abort", "error")
NAN_LOGITS = "nan_logits"  # the stop_reason of a sample that ended with "error"

# Numbers and their bounds, within which no float32 of the sampler overflows.
_NUMBERS: Mapping[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0 <= x <= 1e9, "in [0, 1e9]"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "presence_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "repetition_penalty": (lambda x: 1e-6 <= x <= 1e6, "in [1e-6, 1e6]"),
}
MAX_BIAS = 1e30
_FLAGS = ("include_stop_str_in_output", "ignore_eos", "detokenize", "skip_special_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued; names, defaults and bounds are vLLM's.

    Applied to float32 logits in this order: min_tokens mask, logit_bias, penalties (repetition
    over prompt and output, presence and frequency over output), temperature, min_p, top_k, top_p,
    then a draw from a counter-based generator keyed by (seed, sample index, position).

    ``n`` samples (1 to 16384) share the prompt. ``temperature`` in [0, 1e9], below 1e-5 is greedy.
    ``top_k`` 0 or -1, or the vocabulary's size and above, is off. ``logprobs``: how many
    alternatives per token in ``Logprobs.top``, at most the vocabulary's size (0: only the sampled
    token's, None: no alternatives; the sampled token's three logprobs always come).
    ``prompt_logprobs`` likewise for the prompt. ``max_tokens`` None: up to ``max_model_len``.
    ``seed``: an integer of 64 bits with sign; None (or -1): the engine draws one per request and
    sample. ``stop``: at most 256 strings of 4096 characters; ``stop_token_ids`` and ``logit_bias``
    (values within +-1e30): at most 65,536 tokens each. Raises ``InvalidRequest``.
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
        if is_int(self.top_k) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if is_int(self.seed) and self.seed == -1:
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
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known: {', '.join(known)}"
                raise InvalidRequest(f"unknown sampling parameter {_short(key)}{hint}")
        return cls(**values)

    def _check_ranges(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise InvalidRequest(f"{name} must be {rule}, got {_short(getattr(self, name))}")

        def whole(name: str, least: int, most: int, rule: str) -> None:
            value = getattr(self, name)
            need(is_int(value) and least <= value <= most, name, rule)

        for name, (fits, rule) in _NUMBERS.items():
            object.__setattr__(self, name, _as_number(name, getattr(self, name)))
            need(fits(getattr(self, name)), name, rule)
        for name in _FLAGS:
            need(isinstance(getattr(self, name), bool), name, "true or false")
        whole("n", 1, MAX_SAMPLES, f"in 1..{MAX_SAMPLES}")
        whole("top_k", 0, MAX_TOP_K, f"in 1..{MAX_TOP_K}, or 0 or -1 for off")
        whole("min_tokens", 0, MAX_INT, "at least 0, in 64 bits")
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0)):
            if getattr(self, name) is not None:
                whole(name, least, MAX_INT, f"at least {least}, in 64 bits, or None")
        if self.seed is not None:
            whole("seed", -MAX_INT - 1, MAX_INT, "an integer of 64 bits with sign, or None")
        need(all(isinstance(s, str) and s for s in self.stop), "stop", "non-empty strings")
        short = len(self.stop) <= MAX_STOPS and all(len(s) <= MAX_STOP_CHARS for s in self.stop)
        need(short, "stop", f"at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters")
        need(all(map(is_int, self.stop_token_ids)), "stop_token_ids", "integers")
        for name in ("stop_token_ids", "logit_bias"):
            few = len(getattr(self, name) or ()) <= MAX_TOKEN_RULES
            need(few, name, f"at most {MAX_TOKEN_RULES} tokens")
        bounded = all(-MAX_BIAS <= b <= MAX_BIAS for b in (self.logit_bias or {}).values())
        need(bounded, "logit_bias", f"finite, within +-{MAX_BIAS:g}, for every token")

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
    token, an int for a stop id, a str for a stop string), "length", or one of two that leave the
    sample cut short, so that whoever scores it must look: "abort" (``abort``, a pause with
    mode="abort", or an update with in_flight="abort") and "error" with ``stop_reason``
    "nan_logits" (the weights, or this request's settings, gave logits that are not numbers; the
    tokens up to there are good).
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


def _short(value: Any) -> str:
    """For a message: a value of any size takes a line."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return f"an integer of {value.bit_length()} bits" if is_int(value) else "a huge value"
    return text if len(text) <= 200 else f"{text[:200]} ..."


def _as_tuple(name: str, value: Any) -> tuple[Any, ...]:
    if value is None:
        return ()
    try:
        return tuple(value)
    except TypeError:
        raise InvalidRequest(f"{name} must be a list, got {_short(value)}") from None


def _as_number(name: str, value: Any) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise InvalidRequest(f"{name} must be a number, got {_short(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf  # which is out of every bound


def _as_bias(value: Any) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        text = f"logit_bias must map token ids to numbers, got {_short(value)}"
        raise InvalidRequest(text) from None
