"""Messages of OpenAI's requests, in the form that chat templates take."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollout.api.video_inputs import FIELDS
from rollout.api.visual_inputs import IMAGE_KINDS, VIDEO_KINDS, part_url
from rollout.errors import InvalidRequest


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as a template reads them; raises ``InvalidRequest`` naming the one at fault.

    Content is one text: parts of type "text" are joined, null is "" where an assistant called
    tools or only thought; where a part is an image or a video, the list of them. Arguments of tool
    calls become objects. Fields that are null are left out, as clients send those of an answer that
    had none.
    """
    return [_message(f"messages[{number}]", message) for number, message in enumerate(messages)]


def _message(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None}
    role = given.get("role")
    if not isinstance(role, str):
        raise InvalidRequest(f"{where} needs a role")
    if "function_call" in given:
        raise InvalidRequest(f"{where} carries function_call, which is not supported: tool_calls")
    calls = given.pop("tool_calls", None)
    thought = given.pop("reasoning", None) or given.get("reasoning_content")
    if role == "assistant":
        if thought:
            given["reasoning_content"] = thought  # the name that templates know
            if not (calls and given.get("content")):
                given["thinking"] = thought  # gpt-oss's, which takes none beside text and a call
        if calls:
            given["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    elif calls:
        raise InvalidRequest(f"{where} carries tool_calls, which only an assistant has")
    silent = role == "assistant" and bool(calls or thought)
    return {**given, "content": _content(where, given.get("content"), silent)}


def _content(where: str, content: Any, may_be_missing: bool) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if content is None and may_be_missing:
        return ""
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} needs content: a text, or a list of text parts")
    parts = [_part(f"{where}.content[{number}]", part) for number, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _part(where: str, part: Any) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if isinstance(part, Mapping) and kind in IMAGE_KINDS:
        return {"type": "image_url", "image_url": {"url": part_url(where, part)}}
    if isinstance(part, Mapping) and kind in VIDEO_KINDS:
        said = {name: part[name] for name in FIELDS if part.get(name) is not None}
        return {"type": "video_url", "video_url": {"url": part_url(where, part)}, **said}
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise InvalidRequest(
            f'{where} is a part of type {kind!r}; only {{"type": "text", "text": ...}}, '
            '{"type": "image_url", ...} and {"type": "video_url", ...} are supported'
        )
    return {"type": "text", "text": text}


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where} must be a list")
    return [_call(f"{where}[{number}]", call) for number, call in enumerate(calls)]


def _call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where} needs a function with a name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(f"{where}.function.arguments is not JSON: {error}") from error
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{where}.function.arguments must be the JSON of an object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
