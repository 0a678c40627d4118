"""Tool calls whose arguments are written as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rollout.server.http.parsers.call import Call, Parse, Parsed, Tools, may_begin, tagged
from rollout.server.http.parsers.partial_json import (
    as_string,
    before_mark,
    items_end,
    next_item,
    object_fields,
    skip_space,
    value_end,
)


def hermes(text: str, final: bool, tools: Tools) -> Parsed:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""
    return _json_between(text, final, "<tool_call>", "</tool_call>")


def nemotron_json(text: str, final: bool, tools: Tools) -> Parsed:
    """``<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>``: Nemotron Nano 2."""
    return _json_between(text, final, "<TOOLCALL>", "</TOOLCALL>")


def llama3_json(text: str, final: bool, tools: Tools) -> Parsed:
    """The whole answer is ``{"name": ..., "parameters": {...}}``, or several with ``;`` between."""
    at = skip_space(text, 0)
    if text.startswith(_PYTHON_TAG, at):
        at = skip_space(text, at + len(_PYTHON_TAG))
    elif not final and _PYTHON_TAG.startswith(text[at:]):
        return "", []
    calls: list[Call] = []
    while text[at : at + 1] == "{":
        call, end = _json_call(text, at)
        if call is None:
            break
        calls.append(call)
        if end is None:
            return "", calls
        at = next_item(text, end, (";", ","))
    if calls:
        return text[at:] if final else "", calls
    undecided = at == len(text) or (text[at] == "{" and object_fields(text, at)[1] is None)
    return ("" if undecided and not final else text), []


def mistral(text: str, final: bool, tools: Tools) -> Parsed:
    """``[TOOL_CALLS]`` and ``[{"name": ..., "arguments": {...}}, ...]``, or ``NAME[ARGS]{...}``."""
    return _behind(text, final, "[TOOL_CALLS]")


def granite(text: str, final: bool, tools: Tools) -> Parsed:
    """``<|tool_call|>[{"name": ..., "arguments": {...}}, ...]``: Granite 3."""
    return _behind(text, final, "<|tool_call|>")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Section:
    """Marks around all calls, and each one's: ``call`` NAME ``arguments`` {...} ``ended``."""

    begin: str
    end: str
    call: str
    arguments: str
    ended: str

    def parse(self, text: str, final: bool, tools: Tools) -> Parsed:
        return tagged(text, final, self.begin, self.end, self._read)

    def _read(self, text: str, at: int) -> tuple[list[Call], int | None]:
        calls: list[Call] = []
        while text.startswith(self.call, at):
            head, start = at + len(self.call), text.find(self.arguments, at)
            if text.find(self.end, head, None if start < 0 else start) >= 0:
                return calls, at  # this one is none
            if start < 0:
                return calls, None
            name, start = text[head:start].strip(), skip_space(text, start + len(self.arguments))
            if start < len(text) and (text[start] not in '{"' or not name):
                return calls, at if calls else None
            end = value_end(text, start)
            if start < len(text):
                calls.append(self._call(name, text[start:end]))
            if end is None:
                return calls, None
            at = skip_space(text, end)
            if text.startswith(self.ended, at):
                at = skip_space(text, at + len(self.ended))
            elif may_begin(text, at, self.ended):
                return calls, None
        return calls, None if may_begin(text, at, self.call, self.end) else at

    def _call(self, name: str, arguments: str) -> Call:
        return Call(name, _plain(arguments))


class _Kimi(_Section):
    """A call's name is an id, ``functions.NAME:NUMBER``."""

    def _call(self, name: str, arguments: str) -> Call:
        return Call(name.removeprefix("functions.").partition(":")[0], _plain(arguments), name)


#: Kimi K2, Kimi Linear
kimi_k2 = _Kimi(
    begin="<|tool_calls_section_begin|>",
    end="<|tool_calls_section_end|>",
    call="<|tool_call_begin|>",
    arguments="<|tool_call_argument_begin|>",
    ended="<|tool_call_end|>",
).parse

_V31 = _Section(
    begin="<｜tool▁calls▁begin｜>",
    end="<｜tool▁calls▁end｜>",
    call="<｜tool▁call▁begin｜>",
    arguments="<｜tool▁sep｜>",
    ended="<｜tool▁call▁end｜>",
)

#: DeepSeek-V3.1
deepseek_v31 = _V31.parse

#: DeepSeek-V3, R1
deepseek_v3 = replace(
    _V31,
    call=f"{_V31.call}function{_V31.arguments}",
    arguments="\n```json\n",
    ended=f"```{_V31.ended}",
).parse


def required(text: str, final: bool, tools: Tools) -> Parsed:
    """What a grammar made of ``tool_choice`` "required": a list of calls."""
    at = skip_space(text, 0)
    calls = _json_array(text, at)[0] if text[at : at + 1] == "[" else []
    return (text if final and not calls else ""), calls


def named(name: str) -> Parse:
    """The arguments of one tool, which the request has chosen."""

    def parse(text: str, final: bool, tools: Tools) -> Parsed:
        return "", ([Call(name, text.strip())] if text.strip() else [])

    return parse


_PYTHON_TAG, _ARGS = "<|python_tag|>", "[ARGS]"


def _json_between(text: str, final: bool, opening: str, closing: str) -> Parsed:
    """An object that is a call, or a list of them, between tags."""

    def read(text: str, at: int) -> tuple[list[Call], int | None]:
        if text.startswith("[", at):
            return _json_array(text, at)
        call, end = _json_call(text, at)
        return ([] if call is None else [call]), end

    return tagged(text, final, opening, closing, read)


def _behind(text: str, final: bool, mark: str) -> Parsed:
    """Lists of calls behind marks, or names and arguments; the first mark ends the text."""
    start = text.find(mark)
    if start < 0:
        return (text if final else before_mark(text, mark)), []
    calls, content, rest = list[Call](), text[:start], text[start:]
    while rest.startswith(mark):
        at = skip_space(rest, len(mark))
        part, end = (_json_array if rest[at : at + 1] == "[" else _named_arguments)(rest, at)
        if not part:
            break
        calls += part
        rest = "" if end is None else rest[end:].lstrip()
    return content + (rest if final else ""), calls


def _json_call(text: str, start: int) -> tuple[Call | None, int | None]:
    """The call of the object at ``start``, once its name and the first of its arguments came."""
    if text[start : start + 1] != "{":
        return None, None
    fields, end = object_fields(text, start)
    name = as_string(fields.get("name", ""))
    key = next((key for key in fields if key in ("arguments", "parameters")), None)
    if not name or key is None:
        return None, end
    return Call(name, _plain(fields[key])), end


def _json_array(text: str, start: int) -> tuple[list[Call], int | None]:
    """The calls of the array at ``start``, the last one maybe open; None while it goes on.

    Where it is no JSON any more it ends, too.
    """
    calls: list[Call] = []
    at = skip_space(text, start + 1)
    while text[at : at + 1] == "{":
        call, end = _json_call(text, at)
        calls += [call] if call is not None else []
        if end is None:
            return calls, None
        at = next_item(text, end)
    return calls, items_end(text, at, "]")


def _named_arguments(text: str, start: int) -> tuple[list[Call], int | None]:
    brace = text.find("{", start)
    if brace < 0:
        return [], None
    name = text[start:brace].partition(_ARGS)[0].partition("[")[0].strip()
    end = value_end(text, brace)
    return ([Call(name, text[brace:end])] if name else []), end


def _plain(arguments: str) -> str:
    """``arguments`` may also be a string that holds the JSON."""
    return (as_string(arguments) or "") if arguments.startswith('"') else arguments
