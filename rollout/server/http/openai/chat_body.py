"""Bodies of requests that carry messages: chat completions, and tokenizing a chat."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rollout.errors import InvalidRequest
from rollout.generation import ChatOptions, SamplingParams
from rollout.server.http.openai.assistant import MessageReader
from rollout.server.http.openai.grammars import Grammar, of_tool, of_tools
from rollout.server.http.openai.messages import template_messages
from rollout.server.http.openai.types import SamplingBody
from rollout.server.http.parsers import TOOL_PARSERS, ReasoningParser, ToolParser, named, required

_NAMED = "function:"


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
    prompt_logprobs: int | None = None
    add_special_tokens: Literal[False] = False  # the template brings them

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
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs are not available when stream=True")
        limit = self.max_completion_tokens
        limit = self.max_tokens if limit is None else limit
        if limit == 0:
            raise InvalidRequest("max_tokens must be at least 1 in a chat, got 0")
        params = self.params(
            max_tokens=limit,
            logprobs=self.top_logprobs if self.logprobs else None,
            prompt_logprobs=self.prompt_logprobs,
        )
        return replace(params, skip_special_tokens=False) if keep_special else params

    def reader(self, tools: ToolParser | None, reasoning: ReasoningParser | None) -> MessageReader:
        """How the answer is read, by the parsers that the server has; raises ``InvalidRequest``."""
        choice = self._choice()
        reader = MessageReader(
            reasoning=reasoning,
            show_reasoning=self.include_reasoning,
            tools=self.schemas(),
            one_call=not self.parallel_tool_calls,
            special=reasoning is not None and reasoning.special,
        )
        if choice == "none":
            return reader
        if choice == "required":
            return replace(reader, calls=required)
        if choice != "auto":
            return replace(reader, calls=named(choice.removeprefix(_NAMED)))
        if tools is None:
            raise InvalidRequest(
                "the server does not know how this model writes tool calls: start it with "
                f"--tool-call-parser, one of {', '.join(TOOL_PARSERS)}, or send tool_choice none"
            )
        return replace(
            reader,
            calls=tools.parse,
            special=reader.special or tools.special,
        )

    def grammar(self) -> Grammar | None:
        """As ``SamplingBody.grammar``; a required or named tool is one, too."""
        asked, choice = super().grammar(), self._choice()
        if choice in ("none", "auto"):
            return asked
        if asked is not None:
            raise InvalidRequest("a tool_choice that requires a call excludes other grammars")
        if choice == "required":
            return of_tools(self.schemas(), several=self.parallel_tool_calls)
        return of_tool(self.schemas()[choice.removeprefix(_NAMED)])

    def _choice(self) -> str:
        """none, auto, required, or the name of a tool behind ``_NAMED``."""
        choice = self.tool_choice or ("auto" if self.tools else "none")
        if choice == "none":
            return choice
        if not self.tools:
            raise InvalidRequest(f"tool_choice {choice!r:.80} needs tools")
        if isinstance(choice, str):
            if choice not in ("auto", "required"):
                raise InvalidRequest(
                    f"tool_choice {choice!r:.80} is none of none, auto and required; a tool is "
                    'named by {"type": "function", "function": {"name": ...}}'
                )
            return choice
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in self.schemas():
            raise InvalidRequest(f"tool_choice names {name!r:.80}, which is none of the tools")
        return f"{_NAMED}{name}"

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
    return_token_strs: Literal[False] = False  # vLLM's

    @model_validator(mode="before")
    @classmethod
    def _nulls_say_nothing(cls, values: Any) -> Any:
        """verifiers sends its tools always, as null where it has none."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if value is not None}

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
