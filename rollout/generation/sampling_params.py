"""How a prompt is continued: the one table of sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from numbers import Real
from operator import index
from typing import Any

from rollout.errors import EngineRestarted, InvalidRequest
from rollout.generation.grammar import grammar
from rollout.generation.packed import read_experts
from rollout.wire.spellings import SAMPLING, explains_names

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax
MAX_SAMPLES = 16384
MAX_STOPS = 256  # stop strings, each of at most MAX_STOP_CHARS characters
MAX_STOP_CHARS = 4096
MAX_TOKEN_RULES = 1 << 16  # entries of stop_token_ids, and of logit_bias
MAX_TOP_K = (1 << 31) - 1
MAX_NAME = 256  # characters of an adapter's, a group's and a session's
MAX_INT = (1 << 63) - 1  # of whatever else is a whole number: what our gRPC fields hold

TOP_MODES = ("raw", "tempered", "processed")  # after edits and penalties; and after filters, too
MAX_BIAS = 1e25  # within this and the bounds below no float32 of the sampler overflows

# ---- what a sampling parameter may be: ``read`` returns it as it is kept, or raises ValueError
# with what it "must ..." ----


def _param(default: Any, read: Callable[[Any], Any], text: str, *, served: bool = True) -> Any:
    """A row of the table of sampling parameters, from which bodies, messages and flags are made.

    ``served`` False: HTTP bodies and command-line flags do not take it, or in a form of their own.
    """
    return field(default=default, metadata={"read": read, "help": text, "served": served})


def _one_of(*known: str, none: bool = False) -> Callable[[Any], Any]:
    def read(value: Any) -> str | None:
        if none and value is None:
            return None
        if value not in known:
            raise ValueError(f"be one of {', '.join(known)}" + (", or None" if none else ""))
        return str(value)

    return read


def _number(bounds: str) -> Callable[[Any], float]:
    least, most = map(float, bounds[1:-1].split(","))

    def read(value: Any) -> float:
        if not isinstance(value, Real) or isinstance(value, bool):
            raise ValueError("be a number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf  # which is out of every bound
        if not least <= number <= most or (bounds[0] == "(" and number == least):
            raise ValueError(f"be in {bounds}")
        return number

    return read


def _whole(least: int, most: int, rule: str, *, none: bool = False) -> Callable[[Any], Any]:
    def read(value: Any) -> int | None:
        if none and value is None:
            return None
        if (number := _integer(value)) is None:
            raise ValueError("be an integer, or None" if none else "be an integer")
        if not least <= number <= most:
            raise ValueError(f"be {rule}, or None" if none else f"be {rule}")
        return number

    return read


def _integer(value: Any) -> int | None:
    """As Python's own, NumPy's and torch's, too; None for what is no integer."""
    if isinstance(value, bool) or str(getattr(value, "dtype", "")) == "torch.bool":
        return None  # of a mask over the vocabulary, torch's would pass for tokens 0 and 1
    try:
        return index(value)
    except (TypeError, ValueError):
        return None


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("be true or false")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else _as_tuple(value)
    if not all(isinstance(text, str) and text for text in texts):
        raise ValueError("be non-empty strings")
    if len(texts) > MAX_STOPS or any(len(text) > MAX_STOP_CHARS for text in texts):
        raise ValueError(f"be at most {MAX_STOPS} strings of {MAX_STOP_CHARS} characters")
    return texts


def _tokens(value: Any) -> tuple[int, ...]:
    given = _as_tuple(value)
    tokens = tuple(token for token in map(_integer, given) if token is not None)
    if len(tokens) < len(given):
        raise ValueError("be integers")
    if len(tokens) > MAX_TOKEN_RULES:
        raise ValueError(f"be at most {MAX_TOKEN_RULES} tokens")
    return tokens


def _bias(value: Any) -> dict[int, float] | None:
    if value is None:
        return None
    try:
        bias = {_token(key): float(added) for key, added in value.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise ValueError("map token ids to numbers") from None
    if len(bias) > MAX_TOKEN_RULES:
        raise ValueError(f"be at most {MAX_TOKEN_RULES} tokens")
    if not all(-MAX_BIAS <= added <= MAX_BIAS for added in bias.values()):
        raise ValueError(f"be finite, within +-{MAX_BIAS:g}, for every token")
    return bias


def _token(key: Any) -> int:
    """Of a key, which JSON has as a text."""
    token = int(key) if isinstance(key, str) else _integer(key)
    if token is None:
        raise ValueError
    return token


def _allowed(value: Any) -> tuple[int, ...] | None:
    tokens = None if value is None else _tokens(value)
    if tokens == ():
        raise ValueError("name a token at least, or be None")
    return tokens


_OF_TOKENS = (_tokens, _bias, _allowed)  # what these read has to be in the vocabulary


def _as_tuple(value: Any) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping):  # its letters, bytes or keys are no entries
        raise ValueError("be a list")
    try:
        return () if value is None else tuple(value)
    except TypeError:
        raise ValueError("be a list") from None


def _name(value: Any) -> str | None:
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= MAX_NAME):
        raise ValueError(f"be a text of 1 to {MAX_NAME} characters")
    return value


_count = _whole(0, MAX_INT, "at least 0, in 64 bits", none=True)
_alternatives = _whole(
    0, MAX_INT, "from 0 to the vocabulary's size (vLLM's -1, all, is that size)", none=True
)


_PARAMETER = "sampling parameter"


@explains_names(SAMPLING, _PARAMETER, InvalidRequest)
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one prompt is continued; names, defaults and bounds are vLLM's.

    Applied to float32 logits in this order: structured_outputs, allowed_token_ids, min_tokens mask
    and bad_words, logit_bias, penalties (repetition over prompt and output, presence and frequency
    over output), temperature, min_p, top_k, top_p, then a draw from a counter-based generator keyed
    by (seed, sample index, position).
    What is out of bounds, or contradicts another, raises ``InvalidRequest``.
    """

    n: int = _param(
        1, _whole(1, MAX_SAMPLES, f"in 1..{MAX_SAMPLES}"), "samples of each prompt, 1 to 16384"
    )
    temperature: float = _param(
        1.0, _number("[0, 1e9]"), "of sampling, at most 1e9; 0 (below 1e-5) is greedy"
    )
    top_p: float = _param(
        1.0, _number("(0, 1]"), "keep the likeliest tokens up to this mass, in (0, 1]"
    )
    top_k: int = _param(
        0,
        _whole(-1, MAX_TOP_K, f"in 1..{MAX_TOP_K}, or 0 or -1 for off"),
        "keep this many of the likeliest tokens; 0, -1, or the vocabulary's size and above: all",
    )
    min_p: float = _param(
        0.0,
        _number("[0, 1]"),
        "keep tokens at least this likely, relative to the likeliest, in [0, 1]",
    )
    presence_penalty: float = _param(
        0.0, _number("[-2, 2]"), "in [-2, 2], off a logit of each token that the answer has"
    )
    frequency_penalty: float = _param(
        0.0, _number("[-2, 2]"), "in [-2, 2], the same times how often it has it"
    )
    repetition_penalty: float = _param(
        1.0, _number("[1e-6, 1e6]"), "in [1e-6, 1e6]; 1: none; counts the prompt's tokens, too"
    )
    logit_bias: Mapping[int, float] | None = _param(
        None, _bias, "token id -> what is added to its logit, within +-1e25; at most 65,536 tokens"
    )
    seed: int | None = _param(
        None,
        _whole(-MAX_INT - 1, MAX_INT, "an integer of 64 bits with sign", none=True),
        "makes the samples repeatable; 64 bits with sign; none, or -1: the engine draws one",
    )
    stop: tuple[str, ...] = _param(
        (), _texts, "texts that end an answer, at most 256 of 4096 characters"
    )
    stop_token_ids: tuple[int, ...] = _param(
        (), _tokens, "tokens that end an answer, at most 65,536"
    )
    allowed_token_ids: tuple[int, ...] | None = _param(
        None, _allowed, "the only tokens that may be drawn, at most 65,536; none: all"
    )
    bad_words: tuple[str, ...] = _param(
        (), _texts, "texts whose tokens may not come, at most 256 of 4096 characters"
    )
    structured_outputs: Mapping[str, Any] | None = _param(
        None,
        grammar,
        "what the text has to be: one of json (a schema), regex, choice (texts), grammar (EBNF), "
        "json_object (true), structural_tag; needs the extra structured",
    )
    include_stop_str_in_output: bool = _param(False, _flag, "keep the stop text in `text`")
    ignore_eos: bool = _param(False, _flag, "go on after the end-of-sequence token")
    min_tokens: int = _param(
        0, _whole(0, MAX_INT, "at least 0, in 64 bits"), "shortest answer in tokens"
    )
    max_tokens: int | None = _param(
        16,
        _whole(0, MAX_INT, "at least 0, in 64 bits", none=True),
        "longest answer in tokens; none: up to max_model_len; 0: no token is drawn, which needs "
        "`prompt_logprobs` or `hidden_state`",
    )
    logprobs: int | None = _param(
        None,
        _alternatives,
        "alternatives of each token in `Logprobs.top`, at most the vocabulary's size; the sampled "
        "token's own three logprobs always come",
        served=False,
    )
    top_logprobs_mode: str = _param(
        "raw",
        _one_of(*TOP_MODES),
        "which logprobs `Logprobs.top` has: the model's own, those at `temperature`, or those of "
        "what the token was drawn from, where only the tokens appear that were left to it",
        served=False,
    )
    prompt_logprobs: int | None = _param(
        None, _alternatives, "the same for the prompt's tokens", served=False
    )
    prompt_logprobs_start: int = _param(
        0,
        _whole(0, MAX_INT, "at least 0, in 64 bits"),
        "the first token of the prompt that has some; what comes before it may be found in the "
        "prefix cache",
        served=False,
    )
    prompt_temperature: float = _param(
        1.0, _number("[1e-5, 1e9]"), "of `prompt_logprobs`, in [1e-5, 1e9]", served=False
    )
    min_version: int | None = _param(
        None,
        _count,
        "wait until weights of this version or a later one are live, at most the engine's timeout, "
        "and that of Rollout.connect; none: a client's own, and what it has committed; 0: any",
    )
    min_version_epoch: int | None = _param(
        None,
        _count,
        "the epoch in which `min_version` counts: an engine of another has restarted, and says so "
        "instead of waiting; none: whichever is there",
    )
    max_staleness: int | None = _param(
        None,
        _count,
        "versions that a sample's oldest token may lie behind the live one while it is sampled; "
        "none: the engine's setting",
    )
    on_stale: str | None = _param(
        None,
        _one_of("recompute", "finish", "abort", none=True),
        "what becomes of a sample beyond it: recompute (its KV, by the live weights), finish (with "
        "what it has) or abort; none: the engine's setting",
    )
    pin: bool = _param(
        False,
        _flag,
        "finish on the weights that it began with, all of its samples, whatever becomes of other "
        "requests at a commit; at most the update's `pin_timeout`",
    )
    group_id: str | None = _param(
        None,
        _name,
        "requests of one group are pinned together: those that begin later, too, while one of them "
        "is pinned",
    )
    session_id: str | None = _param(
        None,
        _name,
        "of a fleet, the same member for all requests of one session, as far as loads allow",
    )
    adapter: str | None = _param(
        None, _name, "the adapter to answer with, which was loaded by this name; none: the base"
    )
    hidden_state: bool = _param(
        False, _flag, "bring the last hidden state of the prompt's last token", served=False
    )
    pooling: str = _param(
        "last",
        _one_of("last", "mean", "all", "classify", "token_classify"),
        "which `hidden_state`: of the prompt's last token, the mean over all of them, or each of "
        "them, which are all computed then; of a model with a score head what that makes of the "
        "last (classify) or of each of them (token_classify)",
        served=False,
    )
    return_routed_experts: bool = _param(
        False,
        _flag,
        "of a mixture: bring the experts that each token was routed to, as `routed_experts`",
    )
    routed_experts_prompt_start: int = _param(
        0,
        _whole(0, MAX_INT, "at least 0, in 64 bits"),
        "bring those of the tokens from this position on: a caller has the ones before",
    )
    routed_experts: Mapping[str, Any] | None = _param(
        None,
        read_experts,
        "route the prompt's tokens to these experts, integers [tokens, layers with experts, "
        "experts of a token] (or base64 data, shape and dtype); with `prompt_logprobs`",
    )
    return_sampling_mask: bool = _param(
        False,
        _flag,
        "bring the tokens that top_p, top_k, min_p and masks left to draw from, as `sampling_mask`",
    )
    stream_interval: int = _param(
        1,
        _whole(1, MAX_INT, "at least 1, in 64 bits"),
        "of a stream: tokens of a sample between two outputs; its first token and its end come at "
        "once",
    )
    detokenize: bool = _param(True, _flag, "make `text`; else token ids alone", served=False)
    skip_special_tokens: bool = _param(True, _flag, "leave them out of `text`")

    def __post_init__(self) -> None:
        for f in fields(self):
            given = getattr(self, f.name)
            try:
                value = f.metadata["read"](given)
            except ValueError as rule:
                text = f"{f.name} must {rule}, got {_short(given)}"
                raise InvalidRequest(text) from None
            if value == -1 and f.name in ("top_k", "seed"):
                value = f.default
            object.__setattr__(self, f.name, value)
        self._check_contradictions()

    @property
    def classifies(self) -> bool:
        """Whether it asks a score head instead of the decoder below it."""
        return self.pooling in ("classify", "token_classify")

    @property
    def pools_last(self) -> bool:
        """Whether of all hidden states the last is enough."""
        return self.pooling in ("last", "classify")

    @property
    def pools_each(self) -> bool:
        """Whether every token brings a row of its own."""
        return self.pooling in ("all", "token_classify")

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """Build from plain values; an unknown key is refused with the nearest known one."""
        known = [f.name for f in fields(cls)]
        for key in values:
            if key not in known:
                hint = SAMPLING.hint(str(key), known)
                raise InvalidRequest(f"unknown {_PARAMETER} {_short(key)}; {hint}")
        return cls(**values)

    @classmethod
    def of(cls, params: Any) -> SamplingParams:
        """What one request's ``params`` mean: these, a mapping of their fields, or None."""
        if isinstance(params, Mapping):
            return cls.from_dict(params)
        if not isinstance(params, SamplingParams | None):
            raise InvalidRequest("params must be SamplingParams, or a list of them, one per prompt")
        return params or cls()

    def check_epoch(self, epoch: int) -> None:
        """``EngineRestarted`` where its ``min_version`` counts in another one."""
        if self.min_version_epoch not in (None, epoch):
            raise EngineRestarted(
                f"version {self.min_version or 0} of epoch {self.min_version_epoch} was asked for, "
                f"and this is epoch {epoch}: the engine has restarted, its versions count anew, "
                "and its weights are not yours until you send a full update (or set min_version "
                "anew, and begin a new session)"
            )

    def _check_contradictions(self) -> None:
        if self.greedy and self.n > 1:
            raise InvalidRequest(f"n must be 1 when using greedy sampling, got {self.n}.")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                f"min_tokens ({self.min_tokens}) is greater than max_tokens ({self.max_tokens})"
            )
        if self.min_tokens and self.structured_outputs is not None:
            raise InvalidRequest(
                "min_tokens cannot be combined with structured_outputs, which say when to stop"
            )
        if self.pooling != "last" and not self.hidden_state:
            raise InvalidRequest(f'pooling "{self.pooling}" needs hidden_state=True')
        if self.max_tokens == 0:
            self._check_answerless()
        if self.routed_experts is not None and self.prompt_logprobs is None:
            raise InvalidRequest(
                "routed_experts route a prompt that is scored: set prompt_logprobs (0)"
            )
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop strings need detokenize=True; use stop_token_ids instead")

    def _check_answerless(self) -> None:
        if self.prompt_logprobs is None and not self.hidden_state:
            raise InvalidRequest(
                "max_tokens must be at least 1, or None, but for a request that has "
                "prompt_logprobs or hidden_state, got 0"
            )
        if self.n > 1 or self.logprobs is not None or self.structured_outputs is not None:
            raise InvalidRequest(
                "with max_tokens 0 there is no answer: n, logprobs and structured_outputs have "
                "nothing to say"
            )


TOKEN_PARAMS = tuple(f.name for f in fields(SamplingParams) if f.metadata["read"] in _OF_TOKENS)


def _short(value: Any) -> str:
    """For a message: a value of any size takes a line."""
    if getattr(value, "shape", ()) and hasattr(value, "dtype"):
        return f"an array of {value.dtype} {list(value.shape)}"
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python prints
        return (
            f"an integer of {value.bit_length()} bits" if isinstance(value, int) else "a huge value"
        )
    return text if len(text) <= 200 else f"{text[:200]} ..."
