"""OpenAI's ``/v1/responses``: a chat under other names. Nothing is stored."""

from __future__ import annotations

import contextlib
import json
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from pydantic import ValidationError

from rollout.api.backend import Outputs
from rollout.errors import InvalidRequest, RolloutError
from rollout.generation import RequestOutput
from rollout.server.http.errors import error_body
from rollout.server.http.openai.answers import usage
from rollout.server.http.openai.assistant import MessageReader
from rollout.server.http.openai.chat_body import ChatBody
from rollout.server.http.openai.response_items import Event, ResponseItems

_RENAMED = {"max_output_tokens": "max_tokens"}
_OWN = frozenset(("input", "instructions", "text", "tools", "reasoning", "include", "truncation"))
# What a chat's answer has beside its message, and a response has no place for.
_OF_CHATS = (
    *("prompt_logprobs", "logprobs", "top_logprobs", "return_token_ids"),
    *("return_sampling_mask", "return_routed_experts"),
)
_LOGPROBS = "message.output_text.logprobs"  # of ``include``: OpenAI's word for them
_STORED = ("previous_response_id", "conversation", "prompt", "background")


def chat_of(body: Mapping[str, Any]) -> ChatBody:
    """The chat that a body of ``/v1/responses`` means; raises ``InvalidRequest``."""
    given = {key: value for key, value in body.items() if value is not None}
    if stored := [name for name in _STORED if given.pop(name, None)]:
        raise InvalidRequest(f"{stored[0]} is not supported: no response is stored, send them all")
    made = {_RENAMED.get(k, k): v for k, v in given.items() if k not in _OWN}
    made["messages"] = _messages(given.get("instructions"), given.get("input"))
    if tools := given.get("tools"):
        if not isinstance(tools, list):
            raise InvalidRequest("tools must be a list of functions")
        made["tools"] = [_tool(tool) for tool in tools]
    if form := _object("text.format", _object("text", given.get("text")).get("format")):
        named = form.get("type") == "json_schema"
        made["response_format"] = {"type": "json_schema", "json_schema": form} if named else form
    if effort := _object("reasoning", given.get("reasoning")).get("effort"):
        made["reasoning_effort"] = effort
    include = given.get("include", ())
    if isinstance(include, list) and _LOGPROBS in include:
        raise _absent("logprobs")
    try:
        chat = ChatBody.model_validate(made)
    except ValidationError as error:
        row = error.errors()[0]
        where = ".".join(map(str, row["loc"]))
        message = str(row["msg"]).removeprefix("Value error, ")
        raise InvalidRequest(f"{where}: {message}" if where else message) from error
    for name in _OF_CHATS:
        if getattr(chat, name) != ChatBody.model_fields[name].default:
            raise _absent(name.removeprefix("return_"))
    return chat


def _absent(name: str) -> InvalidRequest:
    return InvalidRequest(f"a response has no {name}: /v1/chat/completions has them")


class ResponseAnswer:
    """One response: what it says of itself, whole or as a stream of events."""

    def __init__(self, body: Mapping[str, Any], model: str, reader: MessageReader) -> None:
        self.id = str(body.get("request_id") or f"resp_{uuid.uuid4().hex}")
        self._body, self._model, self._reader = body, model, reader
        self._created = time.time()
        self._items = ResponseItems(self.id)

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        for _ in self._events(output):
            pass
        return self._response(output)

    async def stream(
        self, first: tuple[int, RequestOutput], outputs: Outputs
    ) -> AsyncGenerator[str]:
        """Server-sent events; an error after the first output is one of them."""
        begun = self._response(None)
        yield _sent(self._items.event("response.created", response=begun))
        yield _sent(self._items.event("response.in_progress", response=begun))
        async with contextlib.aclosing(outputs):
            try:
                _, output = first
                for event in self._events(output):
                    yield _sent(event)
                async for _, output in outputs:
                    for event in self._events(output):
                        yield _sent(event)
            except RolloutError as error:
                told = error_body(error)[0]["error"]
                fields = {"code": told["type"], "message": told["message"], "param": None}
                yield _sent(self._items.event("error", **fields))
                return
        response = self._response(output)
        yield _sent(self._items.event(f"response.{response['status']}", response=response))

    def _events(self, output: RequestOutput) -> list[Event]:
        [completion] = output.outputs
        ended = completion.finish_reason is not None
        message = self._reader.read(completion.text, output.prompt or "", ended)
        made = list(self._items.events(message))
        return [*made, *self._items.close()] if ended else made

    def _response(self, output: RequestOutput | None) -> dict[str, Any]:
        reason = None if output is None else output.outputs[0].finish_reason
        status = "in_progress" if output is None else "completed"
        cut = {"length": "max_output_tokens", "abort": "content_filter", "error": "content_filter"}
        if reason in cut:
            status = "incomplete"
        asked = self._body
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": cut[reason]} if reason in cut else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": self._model,
            "output": [] if output is None else list(self._items.done),
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "store": False,
            "temperature": asked.get("temperature", 1.0),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None if output is None else _usage(output, self._reader),
            "epoch": None if output is None else output.epoch,
            "weight_versions": [] if output is None else _versions(output),
        }


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping | None):
        raise InvalidRequest(f"{name} must be an object, got {value!r:.80}")
    return value or {}


def _messages(instructions: Any, given: Any) -> list[dict[str, Any]]:
    messages = [] if instructions is None else [{"role": "system", "content": instructions}]
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        raise InvalidRequest("input must be a text, or a list of items")
    for item in given:
        messages += _message(item)
    return messages


def _message(item: Mapping[str, Any]) -> list[dict[str, Any]]:
    kind = item.get("type", "message")
    if kind == "message":
        return [{"role": item.get("role"), "content": _content(item.get("content"))}]
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        return [{"role": "assistant", "content": None, "tool_calls": [call]}]
    if kind == "function_call_output":
        output = _content(item.get("output"))
        return [{"role": "tool", "tool_call_id": item.get("call_id"), "content": output}]
    if kind == "reasoning":
        return []  # templates leave out what earlier turns thought
    raise InvalidRequest(f"input has an item of type {kind!r:.80}, which is not supported")


def _content(content: Any) -> Any:
    """Parts as chats have them: of texts by another name, of images as they are."""
    if not isinstance(content, list):
        return content
    texts = ("input_text", "output_text", "text")
    return [
        {**part, "type": "text"}
        if isinstance(part, Mapping) and part.get("type") in texts
        else part
        for part in content
    ]


def _tool(tool: Any) -> Any:
    """Functions lie flat here."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function":
        raise InvalidRequest("tools are functions: none that a server runs is here")
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _usage(output: RequestOutput, reader: MessageReader) -> dict[str, Any]:
    found = usage([output], reader)
    thought = found.get("completion_tokens_details", {"reasoning_tokens": 0})
    return {
        "input_tokens": found["prompt_tokens"],
        "input_tokens_details": {**found["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": found["completion_tokens"],
        "output_tokens_details": thought,
        "total_tokens": found["total_tokens"],
    }


def _versions(output: RequestOutput) -> list[dict[str, int]]:
    spans = output.outputs[0].weight_versions
    return [{"version": s.version, "start": s.start, "stop": s.stop} for s in spans]


def _sent(event: Event) -> str:
    return f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"
