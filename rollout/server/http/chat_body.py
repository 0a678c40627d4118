"""Bodies of requests that carry messages: chat completions, and tokenizing a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.chat import ChatOptions
from rollout.errors import InvalidRequest
from rollout.generation import SamplingParams
from rollout.server.http.assistant import MessageReader
from rollout.server.http.messages import template_messages
from rollout.server.http.reasoning import ReasoningParser
from rollout.server.http.tool_parsers import TOOL_PARSERS, ToolParser
from rollout.server.http.types import SamplingBody


class ConversationBody(BaseModel):
    """What of a body goes through the chat template."""

    model_config = ConfigDict(extra="forbid", strict=True)

    tools: list[dict[str, Any]] = []
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def options(self, **variables: Any) -> ChatOptions:
        """For the template, with these ``variables`` too; raises ``InvalidRequest``."""
        if self.chat_template is not None:
            raise InvalidRequest(
                "chat_template is the server's own: start it with --chat-template, and give "
                "chat_template_kwargs here"
            )
        for number, tool in enumerate(self.tools):
            _check_tool(number, tool)
        return ChatOptions(
            tools=self.tools,
            chat_template_kwargs={**variables, **self.chat_template_kwargs},
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )


class ChatBody(ConversationBody, SamplingBody):
    """``/v1/chat/completions``: text messages, rendered by the checkpoint's chat template."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    def conversation(self) -> list[dict[str, Any]]:
        return template_messages(self.messages)

    def chat_options(self) -> ChatOptions:
        effort = (
            {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        )
        return self.options(**effort)

    def sampling(self, *, keep_special: bool = False) -> SamplingParams:
        """``keep_special``: what reads the answer looks for special tokens in its text."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs=true")
        limit = self.max_completion_tokens or self.max_tokens
        params = self.params(
            max_tokens=limit, logprobs=self.top_logprobs if self.logprobs else None
        )
        return replace(params, skip_special_tokens=False) if keep_special else params

    def reader(self, tools: ToolParser | None, reasoning: ReasoningParser | None) -> MessageReader:
        """How the answer is read, by the parsers that the server has; raises ``InvalidRequest``."""
        choice = self.tool_choice or ("auto" if self.tools else "none")
        if choice not in ("none", "auto"):
            raise InvalidRequest(f"tool_choice {choice!r} is not supported; use auto or none")
        reader = MessageReader(
            reasoning=reasoning,
            show_reasoning=self.include_reasoning,
            one_call=not self.parallel_tool_calls,
            special=reasoning is not None and reasoning.special,
        )
        if choice == "none":
            return reader
        if not self.tools:
            raise InvalidRequest(f"tool_choice {choice!r} needs tools")
        if tools is None:
            raise InvalidRequest(
                "the server does not know how this model writes tool calls: start it with "
                f"--tool-call-parser, one of {', '.join(TOOL_PARSERS)}, or send tool_choice none"
            )
        return replace(
            reader,
            calls=tools.parse,
            tools=self.schemas(),
            special=reader.special or tools.special,
        )

    def schemas(self) -> dict[str, dict[str, Any]]:
        """The parameters of each tool."""
        functions = [tool["function"] for tool in self.chat_options().tools]
        return {f["name"]: f.get("parameters") or {} for f in functions}


class TokenizeBody(ConversationBody):
    """``/tokenize``: the ids of ``prompt``, or of ``messages`` through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("exactly one of 'prompt' and 'messages' must be given")
        return self


def _check_tool(number: int, tool: Any) -> None:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        raise InvalidRequest(
            f'tools[{number}] must be {{"type": "function", "function": {{"name": ...}}}}'
        )
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequest(f"tools[{number}].function needs a name")
    if not isinstance(function.get("parameters") or {}, Mapping):
        raise InvalidRequest(f"tools[{number}].function.parameters must be a JSON schema")
