"""Bodies of the OpenAI-compatible requests, and their sampling parameters.

Fields and defaults are OpenAI's, with vLLM's extensions. A field that is neither is refused with
the nearest known one, so that a misspelt parameter is never silently dropped.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams

TokenId = Annotated[int, Field(ge=0)]
Prompt = str | list[TokenId]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]


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
}
_SHARED: Mapping[str, Any] = {
    f.name: (_BODY_TYPES.get(kind, kind), f.default)
    for f, kind in zip(fields(SamplingParams), get_type_hints(SamplingParams).values(), strict=True)
    if f.metadata["served"]
}


class SamplingBody(create_model("_Shared", **_SHARED)):  # type: ignore[misc]
    """What completions and chat completions share: the fields of ``SamplingParams``, and these.

    ``logprobs_mode`` says which of a token's logprobs fills OpenAI's field: the model's own or
    those of the distribution that was sampled (None: the server's choice, raw as in vLLM if it
    was told none); both always come as ``raw_logprobs`` and ``processed_logprobs`` beside it.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    logprobs_mode: LogprobsMode | None = None
    request_id: str | None = None
    user: str | None = None  # accepted and not used, as is the next
    metadata: dict[str, str] | None = None
    priority: Literal[0] = 0  # first come first served: no other is honoured

    @model_validator(mode="before")
    @classmethod
    def _known_and_set(cls, values: Any) -> Any:
        """Refuse unknown fields by name; an explicit null means the default."""
        if not isinstance(values, dict):
            return values
        known = list(cls.model_fields)
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(f"unknown field {key!r}{hint}")
        return {key: value for key, value in values.items() if value is not None}

    def params(
        self, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> SamplingParams:
        """The sampling parameters of this body; raises ``InvalidRequest``."""
        given = {name: getattr(self, name) for name in _SHARED if name in self.model_fields_set}
        own = {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        return SamplingParams(**{**given, **own})


class CompletionBody(SamplingBody):
    """``/v1/completions``. ``echo`` and ``suffix`` are refused; ``best_of`` must equal ``n``."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    max_tokens: int = 16
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    suffix: str | None = None
    best_of: int | None = None

    def prompts(self) -> list[Prompt]:
        """Every prompt of the call; raises ``InvalidRequest`` when there is none."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise InvalidRequest("prompt must not be empty")
        if isinstance(self.prompt[0], int):
            return [[t for t in self.prompt if isinstance(t, int)]]
        return [p for p in self.prompt if not isinstance(p, int)]

    def sampling(self) -> SamplingParams:
        self._check_supported()
        return self.params(
            max_tokens=self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )

    def _check_supported(self) -> None:
        if self.echo:
            raise InvalidRequest("echo is not supported; use prompt_logprobs and return_token_ids")
        if self.suffix:
            raise InvalidRequest("suffix is not supported")
        if self.best_of not in (None, self.n):
            raise InvalidRequest(f"best_of must equal n ({self.n}), got {self.best_of}")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are not available when stream=True")


class ChatBody(SamplingBody):
    """``/v1/chat/completions``: text messages, rendered by the checkpoint's chat template."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def conversation(self) -> list[dict[str, Any]]:
        return text_messages(self.messages)

    def sampling(self) -> SamplingParams:
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true")
        limit = self.max_completion_tokens or self.max_tokens
        return self.params(max_tokens=limit, logprobs=self.top_logprobs if self.logprobs else None)


class TokenizeBody(BaseModel):
    """``/tokenize``: the ids of ``prompt``, or of ``messages`` through the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of 'prompt' and 'messages' must be given")
        return self


def text_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with their content as one string; raises ``InvalidRequest``.

    Content may be a list of parts of type "text"; other parts, and messages without content (an
    assistant's tool calls among them), are refused.
    """
    return [
        {**message, "content": _content(number, message)} for number, message in enumerate(messages)
    ]


def _content(number: int, message: Mapping[str, Any]) -> str:
    content, where = message.get("content"), f"messages[{number}]"
    if not isinstance(message.get("role"), str):
        raise InvalidRequest(f"{where} needs a role")
    if message.get("tool_calls"):
        raise InvalidRequest(f"{where} carries tool_calls, which are not supported; send text")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} needs content: a text, or a list of text parts")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        text = part.get("text") if kind == "text" else None
        if not isinstance(text, str):
            raise InvalidRequest(
                f'{where} has a part of type {kind!r}; only {{"type": "text", "text": ...}} is '
                "supported"
            )
        texts.append(text)
    return "".join(texts)
