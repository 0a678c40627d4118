"""Tool calls in what a model wrote, one small function for each family's format.

A parser is a function of the text so far. While ``final`` is False it leaves out what may yet turn
out to be something else, so that each result is a beginning of the next one and a stream can send
the difference. What does not parse stays text: nothing that the model wrote is lost.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.server.http.partial_json import (
    as_string,
    before_mark,
    object_fields,
    skip_space,
    value_end,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A function's name, and its arguments as the model wrote them: JSON, maybe cut short."""

    name: str
    arguments: str


Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the parameters
Parsed = tuple[str, list[Call]]  # text beside the calls, and the calls
Parse = Callable[[str, bool, Tools], Parsed]


def hermes(text: str, final: bool, tools: Tools) -> Parsed:
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``: Hermes, Qwen2.5, Qwen3."""
    return _tagged(text, final, lambda at: _json_call(text, at))


def qwen3_coder(text: str, final: bool, tools: Tools) -> Parsed:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``."""
    return _tagged(text, final, lambda at: _xml_call(text, at, tools))


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
        at = skip_space(text, end)
        if text[at : at + 1] in (";", ","):
            at = skip_space(text, at + 1)
    if calls:
        return text[at:] if final else "", calls
    undecided = at == len(text) or (text[at] == "{" and object_fields(text, at)[1] is None)
    return ("" if undecided and not final else text), []


def mistral(text: str, final: bool, tools: Tools) -> Parsed:
    """``[TOOL_CALLS]`` and ``[{"name": ..., "arguments": {...}}, ...]``, or ``NAME[ARGS]{...}``."""
    content, found, rest = text.partition(_TOOL_CALLS)
    if not found:
        return (text if final else before_mark(text, _TOOL_CALLS)), []
    calls: list[Call] = []
    while True:
        at = skip_space(rest, 0)
        if rest[at : at + 1] == "[":
            part, end = _json_array(rest, at)
        else:
            part, end = _named_arguments(rest, at)
        calls += part
        if end is None:
            break
        rest = rest[end:].lstrip().removeprefix(_TOOL_CALLS)
        if not rest:
            break
    return (text if final and not calls else content), calls


def pythonic(text: str, final: bool, tools: Tools) -> Parsed:
    """The whole answer is ``[NAME(KEY=VALUE, ...), ...]``: Llama 3.2; known when it is whole."""
    if not text.lstrip().startswith("[") and text.strip():
        return text, []
    try:
        tree = ast.parse(text.strip(), mode="eval").body if final else None
        made = [_python_call(node) for node in getattr(tree, "elts", ())]
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        made = []  # also where a value is none of JSON's
    return (text, []) if final and not made else ("", made)


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


@dataclass(frozen=True, slots=True)
class ToolParser:
    """``special``: marks of the format are special tokens, which the text has to keep."""

    parse: Parse
    special: bool = False


TOOL_PARSERS: Mapping[str, ToolParser] = {
    "hermes": ToolParser(hermes),
    "llama3_json": ToolParser(llama3_json),
    "mistral": ToolParser(mistral, special=True),
    "pythonic": ToolParser(pythonic),
    "qwen3_coder": ToolParser(qwen3_coder),
}

_PYTHON_TAG, _TOOL_CALLS, _ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
Read = Callable[[int], tuple[Call | None, int | None]]  # a call from a place on, and its end


def _tagged(text: str, final: bool, read: Read) -> Parsed:
    """Calls between tags; white space after one belongs to nobody."""
    content, calls, at = "", list[Call](), 0
    while (start := text.find(_OPEN, at)) >= 0:
        content += text[at:start]
        call, end = read(skip_space(text, start + len(_OPEN)))
        close = text.find(_CLOSE, start if end is None else end)
        if call is None:
            if close < 0 and not final:
                return content, calls
            at = len(text) if close < 0 else close + len(_CLOSE)
            content += text[start:at]
            continue
        calls.append(call)
        if end is None:
            return content, calls
        if text.startswith(_CLOSE, skip_space(text, end)):
            end = skip_space(text, end) + len(_CLOSE)
        elif not final and _CLOSE.startswith(text[skip_space(text, end) :]):
            return content, calls
        at = skip_space(text, end)
    rest = text[at:]
    return content + (rest if final else before_mark(rest, _OPEN)), calls


def _json_call(text: str, start: int) -> tuple[Call | None, int | None]:
    """The call of the object at ``start``, once its name and the first of its arguments are there.

    ``arguments`` may also be a string that holds the JSON.
    """
    if text[start : start + 1] != "{":
        return None, None
    fields, end = object_fields(text, start)
    name = as_string(fields.get("name", ""))
    key = next((key for key in ("arguments", "parameters") if key in fields), None)
    if not name or key is None:
        return None, end
    arguments = fields[key]
    if arguments.startswith('"'):
        arguments = as_string(arguments) or ""
    return Call(name, arguments), end


def _json_array(text: str, start: int) -> tuple[list[Call], int | None]:
    """The calls of the array at ``start``, the last one maybe open; None while it goes on."""
    calls: list[Call] = []
    at = skip_space(text, start + 1)
    while text[at : at + 1] == "{":
        call, end = _json_call(text, at)
        calls += [call] if call is not None else []
        if end is None:
            return calls, None
        at = skip_space(text, end)
        if text[at : at + 1] == ",":
            at = skip_space(text, at + 1)
    return calls, at + 1 if text[at : at + 1] == "]" else None


def _named_arguments(text: str, start: int) -> tuple[list[Call], int | None]:
    brace = text.find("{", start)
    if brace < 0:
        return [], None
    name = text[start:brace].partition(_ARGS)[0].partition("[")[0].strip()
    end = value_end(text, brace)
    return ([Call(name, text[brace:end])] if name else []), end


def _xml_call(text: str, start: int, tools: Tools) -> tuple[Call | None, int | None]:
    """Arguments come one by one, each when it is whole, as JSON of its declared type."""
    if not text.startswith("<function=", start):
        return None, None
    close = text.find(">", start)
    if close < 0:
        return None, None
    name = text[start + len("<function=") : close].strip()
    declared = tools.get(name, {}).get("properties")
    types = declared if isinstance(declared, Mapping) else {}
    written, at = "{", skip_space(text, close + 1)
    while text.startswith("<parameter=", at):
        key_end, end = text.find(">", at), text.find("</parameter>", at)
        if key_end < 0 or end < key_end:
            return Call(name, written), None
        key = text[at + len("<parameter=") : key_end].strip()
        value = _typed(
            text[key_end + 1 : end].removeprefix("\n").removesuffix("\n"), types.get(key)
        )
        comma = ", " if len(written) > 1 else ""
        written += f"{comma}{json.dumps(key, ensure_ascii=False)}: {value}"
        at = skip_space(text, end + len("</parameter>"))
    if text.startswith("</function>", at):
        return Call(name, written + "}"), at + len("</function>")
    return Call(name, written), None


def _typed(value: str, schema: Any) -> str:
    """JSON of a value that is written plainly: a string, unless another type is declared."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind not in (None, "string"):
        try:
            return json.dumps(json.loads(value), ensure_ascii=False)
        except (ValueError, RecursionError):
            if value in ("True", "False", "None"):
                return {"True": "true", "False": "false", "None": "null"}[value]
    return json.dumps(value, ensure_ascii=False)


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by keywords")
    given = {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    return Call(ast.unparse(node.func), json.dumps(given, ensure_ascii=False, allow_nan=False))
