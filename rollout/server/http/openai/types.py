"""Bodies of the OpenAI-compatible requests, and their sampling parameters.

Fields and defaults are OpenAI's, with vLLM's extensions. A field that is near to one of them is
refused with its name, so that a misspelt parameter is never silently dropped, and so are those that
are known to change an answer, and are not done here. What else is unknown is logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields, replace
from functools import lru_cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model, model_validator

from rollout.config import MAX_TIMEOUT
from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams
from rollout.server.http.openai.grammars import Grammar, of_response_format
from rollout.wire.spellings import SAMPLING, near

log = logging.getLogger(__name__)

TokenId = Annotated[int, Field(ge=0)]
RequestId = Annotated[str, Field(max_length=1024)]  # with a bound, no half of a surrogate pair
Prompt = str | list[TokenId]
Prompts = str | list[TokenId] | list[str] | list[list[TokenId]]
MAX_FIELDS = 1024  # of a body: the name of each that is unknown is compared with all known ones
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


# Fields that change no answer of ours: what they are about (bills, caches, logs) is not here.
ACCEPTED = frozenset(
    (
        *("store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "prompt_cache_options", "prediction", "max_tool_calls"),
    )
)
NEUTRAL: Mapping[str, Any] = {
    "modalities": ["text"], "use_beam_search": False, "do_sample": True, "echo": False,
    "add_special_tokens": True, "prompt_temperature": 1.0,
    # SGLang's, which its router adds to each body.
    "return_hidden_states": False, "separate_reasoning": True, "stream_reasoning": True,
}  # fmt: skip
RENAMED: Mapping[str, str] = {
    "no_stop_trim": "include_stop_str_in_output",  # this one, too
    "prompt_cache_key": "session_id",  # OpenAI's, for the same
}
# Fields that would change it, and what to do.
UNSUPPORTED: Mapping[str, str] = {
    "functions": "use tools",
    "function_call": "use tool_choice",
    "modalities": 'answers are text: leave it out, or send ["text"]',
    "audio": "answers are text: leave it out",
    "web_search_options": "nothing is searched: give the text as a message",
    "verbosity": "say it in a message",
    "timeout": "this route has none: bound the wait in the client, which ends the request",
    "moderation": "nothing is moderated here: leave it out",
    "context_management": "send what the model is to see",
    "return_hidden_states": "vectors of hidden states come from POST /v1/embeddings",
    "prompt_temperature": "/inference/v1/generate has it among its sampling_params",
    "separate_reasoning": "it is separate where the server has a --reasoning-parser",
    "stream_reasoning": "it streams as it comes; stream=false brings all at once",
    "echo": "/v1/completions has it; return_token_ids brings a chat's prompt",
    "thinking_token_budget": "max_tokens bounds the thought and what follows it together",
    "add_special_tokens": "send token ids, as /tokenize gives them",
}
# These, too, unless they are empty or false and so ask for nothing.
UNSUPPORTED_VALUES: Mapping[str, str] = {
    "hidden_state": UNSUPPORTED["return_hidden_states"],
    "prompt_logprobs_start": UNSUPPORTED["prompt_temperature"],
    "stop_regex": "stop takes texts: use them, or stop_token_ids",
    "prompt_embeds": "send text or token ids",
    "repetition_detection": "use repetition_penalty, frequency_penalty or presence_penalty",
    "custom_logit_processor": SAMPLING.why_refused("logits_processors") or "",
    "structural_tag": 'use structured_outputs={"structural_tag": ...}',
    "documents": "put them into a message, or into chat_template_kwargs",
    "session_params": "use session_id, or X-Session-ID",
    "logprob_token_ids": "ask for the most likely ones: logprobs, or top_logprobs in a chat",
    "input_ids": "send them to /v1/completions as prompt",
    "mm_processor_kwargs": "images are read as the checkpoint says",
}


def _check_unknown(field: str, value: Any, known: list[str]) -> None:
    """Pass over a field that changes nothing; raises ValueError for one that would."""
    if field in ACCEPTED or (field in NEUTRAL and NEUTRAL[field] == value):
        return
    if field in UNSUPPORTED_VALUES and not value:
        return
    why = UNSUPPORTED.get(field) or UNSUPPORTED_VALUES.get(field) or SAMPLING.why_refused(field)
    if why:
        raise ValueError(f"{field} is not supported; {why}")
    if field in SAMPLING.same or near(field, known):
        raise ValueError(f"unknown field {field[:80]!r}; {SAMPLING.hint(field, known)}")
    _warn_of(field[:80])


@lru_cache(maxsize=256)  # once a name, and a bounded number of them
def _warn_of(field: str) -> None:
    log.warning("the field %r of a request is unknown, and is not used", field)


class StreamOptions(BaseModel):
    """``include_usage``: a last chunk without choices carries the usage, and with
    ``continuous_usage_stats`` every chunk the usage so far.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # accepted and not used: no padding is ever added


_BODY_TYPES: Mapping[Any, Any] = {  # of fields that are no plain JSON in ``SamplingParams``
    tuple[str, ...]: str | list[str],
    tuple[int, ...]: list[TokenId],
    tuple[int, ...] | None: list[TokenId] | None,
    Mapping[int, float] | None: dict[str, float],
    Mapping[str, Any] | None: dict[str, Any],
}
_SHARED: Mapping[str, Any] = {
    f.name: (_BODY_TYPES.get(kind, kind), f.default)
    for f, kind in zip(fields(SamplingParams), get_type_hints(SamplingParams).values(), strict=True)
    if f.metadata["served"]
}


class OpenAIBody(BaseModel):
    """What every body shares: a model, what is accepted and not used, and the rule for fields."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    request_id: RequestId | None = None
    user: str | None = None  # accepted and not used
    priority: Literal[0] = 0  # first come first served: no other is honoured

    @model_validator(mode="before")
    @classmethod
    def _known_and_set(cls, values: Any) -> Any:
        """Only known fields; an explicit null means the default."""
        if not isinstance(values, dict):
            return values
        if len(values) > MAX_FIELDS:
            raise ValueError(f"the body has {len(values)} fields; at most {MAX_FIELDS} are read")
        known = list(cls.model_fields)
        names = {key: new for key, new in RENAMED.items() if new in known}
        given = {names.get(key, key): v for key, v in values.items() if v is not None}
        for key in [key for key in given if key not in known]:
            _check_unknown(str(key), given.pop(key), known)
        return given


class SamplingBody(create_model("_Shared", __base__=OpenAIBody, **_SHARED)):  # type: ignore[misc]
    """What completions and chat completions share: the fields of ``SamplingParams``, and these.

    ``logprobs_mode`` says which of a token's logprobs fills OpenAI's field: the model's own or
    those of the distribution that was sampled (None: the server's choice, raw as in vLLM if it
    was told none); both always come as ``raw_logprobs`` and ``processed_logprobs`` beside it.
    ``timeout``: seconds after which the request is aborted, and an error.
    """

    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT, strict=False)] | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    logprobs_mode: LogprobsMode | None = None
    response_format: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None  # accepted and not used

    def grammar(self) -> Grammar | None:
        """The one that this body asks for, by whatever name."""
        asked = of_response_format(self.response_format)
        if asked is not None and self.structured_outputs is not None:
            raise InvalidRequest("response_format and structured_outputs exclude each other")
        return self.structured_outputs if asked is None else asked

    def params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """The sampling parameters of this body; raises ``InvalidRequest``."""
        given = {name: getattr(self, name) for name in _SHARED if name in self.model_fields_set}
        if (grammar := self.grammar()) is not None:
            given["structured_outputs"] = grammar
        own = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        return SamplingParams(**{**given, **own})


def prompts_of(given: Prompts, field: str) -> list[Prompt]:
    """Every prompt of a call's ``field``; raises ``InvalidRequest`` when there is none."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise InvalidRequest(f"{field} must not be empty")
    if isinstance(given[0], int):
        return [[t for t in given if isinstance(t, int)]]
    return [p for p in given if not isinstance(p, int)]


def one_for_true(value: Any) -> Any:
    """vLLM takes true, as SkyRL's Tinker server sends it, for one alternative."""
    return 1 if value is True else value


Alternatives = Annotated[int | None, BeforeValidator(one_for_true)]


class CompletionBody(SamplingBody):
    """``/v1/completions``. ``suffix`` is refused."""

    prompt: Prompts
    max_tokens: int = 16
    logprobs: Alternatives = None
    prompt_logprobs: Alternatives = None
    echo: bool = False
    add_special_tokens: bool = True
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[Prompt]:
        """Every prompt of the call; raises ``InvalidRequest`` when there is none."""
        return prompts_of(self.prompt, "prompt")

    @property
    def answerless(self) -> bool:
        """Whether the prompt alone is wanted, with its logprobs."""
        return self.echo and self.max_tokens == 0

    def sampling(self) -> SamplingParams:
        self._check_supported()
        scored = self.prompt_logprobs
        if self.echo and scored is None:
            scored = self.logprobs
        params = self.params(
            max_tokens=1 if self.answerless else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=scored,
        )
        return params if self.best_of is None else replace(params, n=self.best_of)

    def _check_supported(self) -> None:
        if self.suffix:
            raise InvalidRequest("suffix is not supported: no model here fills in a middle")
        if self.best_of is not None and self.best_of < self.n:
            raise InvalidRequest(f"best_of must be at least n ({self.n}), got {self.best_of}")
        if self.stream and self.best_of not in (None, self.n):
            raise InvalidRequest("best_of cannot stream: which is the best is known at the end")
        if self.stream and self.prompt_logprobs is not None and not self.echo:
            raise InvalidRequest("prompt_logprobs are not available when stream=True")
