"""Tool calls that are written as tags: a function's name, and each argument by itself.

Arguments come one by one, each when it is whole, as JSON of its declared type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from rollout.server.http.parsers.call import Call, Parsed, Tools, may_begin, tagged
from rollout.server.http.parsers.partial_json import skip_space

Argument = tuple[str, str, int]  # its name, its value as JSON, and what follows it


def qwen3_coder(text: str, final: bool, tools: Tools) -> Parsed:
    """``<tool_call><function=NAME><parameter=KEY>VALUE</parameter>...</function></tool_call>``."""

    def read(text: str, at: int) -> tuple[list[Call], int | None]:
        if not text.startswith("<function=", at):
            return [], None
        close = text.find(">", at)
        if close < 0:
            return [], None
        name = text[at + len("<function=") : close].strip()
        kinds = _parameter_kinds(tools, name)

        def argument(at: int) -> Argument | None:
            if not text.startswith("<parameter=", at):
                return None
            key_end, end = text.find(">", at), text.find("</parameter>", at)
            if key_end < 0 or end < key_end:
                return None
            key = text[at + len("<parameter=") : key_end].strip()
            value = text[key_end + 1 : end].removeprefix("\n").removesuffix("\n")
            return key, _typed(value, kinds(key)), end + len("</parameter>")

        written, at = _arguments(text, close + 1, argument)
        if text.startswith("</function>", at):
            return [Call(name, written + "}")], at + len("</function>")
        goes_on = _goes_on(text, at, "<parameter=", "</function>")
        return [Call(name, written)], None if goes_on else at

    return tagged(text, final, "<tool_call>", "</tool_call>", read)


def glm45(text: str, final: bool, tools: Tools) -> Parsed:
    """``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>...</tool_call>``, with
    lines between them or without: GLM-4.5, 4.6, 4.7.
    """
    marks = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>"
    opened, named, given, over, closing = marks

    def read(text: str, at: int) -> tuple[list[Call], int | None]:
        begin = at
        while at < len(text) and text[at] not in "\n<":
            at += 1
        name, at = text[begin:at].strip(), skip_space(text, at)
        if not name or not text.startswith((opened, closing), at):
            return [], None
        kinds = _parameter_kinds(tools, name)

        def argument(at: int) -> Argument | None:
            key_end = text.find(named, at) if text.startswith(opened, at) else -1
            if key_end < 0:
                return None
            key = text[at + len(opened) : key_end].strip()
            at = skip_space(text, key_end + len(named))
            end = text.find(over, at)
            if not text.startswith(given, at) or end < 0:
                return None
            value = text[at + len(given) : end]
            return key, _typed(value, kinds(key)), end + len(over)

        written, at = _arguments(text, at, argument)
        if text.startswith(closing, at):
            return [Call(name, written + "}")], at
        return [Call(name, written)], None if _goes_on(text, at, opened, closing) else at

    return tagged(text, final, "<tool_call>", closing, read)


def minimax_m2(text: str, final: bool, tools: Tools) -> Parsed:
    """``<minimax:tool_call><invoke name="NAME"><parameter name="KEY">VALUE</parameter>...``."""
    closing = "</minimax:tool_call>"

    def read(text: str, at: int) -> tuple[list[Call], int | None]:
        return _invokes(text, at, "", closing, tools)

    return tagged(text, final, "<minimax:tool_call>", closing, read)


def deepseek_v32(text: str, final: bool, tools: Tools) -> Parsed:
    """``<｜DSML｜function_calls><｜DSML｜invoke name="NAME">`` and parameters that say whether they
    are strings (``string="true"``) or JSON: DeepSeek-V3.2.
    """
    closing = f"</{_DSML}function_calls>"

    def read(text: str, at: int) -> tuple[list[Call], int | None]:
        return _invokes(text, at, _DSML, closing, tools)

    return tagged(text, final, f"<{_DSML}function_calls>", closing, read)


_DSML = "｜DSML｜"
_SAID = {'string="true"': {"string"}, 'string="false"': {"json"}}


def _invokes(
    text: str, at: int, prefix: str, closing: str, tools: Tools
) -> tuple[list[Call], int | None]:
    """The calls before ``closing``, the last one maybe open."""
    opened, over = f'<{prefix}invoke name="', f"</{prefix}invoke>"
    parameter, ended = f'<{prefix}parameter name="', f"</{prefix}parameter>"
    calls: list[Call] = []
    while text.startswith(opened, at):
        quote, close = text.find('"', at + len(opened)), text.find(">", at)
        if quote < 0 or close < quote:
            return calls, None
        name = text[at + len(opened) : quote]
        kinds = _parameter_kinds(tools, name)

        def argument(at: int, kinds: Callable[[str], set[str]] = kinds) -> Argument | None:
            if not text.startswith(parameter, at):
                return None
            quote = text.find('"', at + len(parameter))
            key_end, end = text.find(">", quote), text.find(ended, at)
            if quote < 0 or key_end < 0 or end < key_end:
                return None
            key, said = text[at + len(parameter) : quote], text[quote + 1 : key_end].strip()
            known = _SAID[said] if said in _SAID else kinds(key)
            return key, _typed(text[key_end + 1 : end], known), end + len(ended)

        written, at = _arguments(text, close + 1, argument)
        if not text.startswith(over, at):
            goes_on = _goes_on(text, at, parameter, over)
            return [*calls, Call(name, written)], None if goes_on else at
        calls.append(Call(name, written + "}"))
        at = skip_space(text, at + len(over))
    return calls, None if may_begin(text, at, opened, closing) else at


def _parameter_kinds(tools: Tools, name: str) -> Callable[[str], set[str]]:
    """Which types each parameter of the tool may have; empty where its schema does not say."""
    root = tools.get(name, {})
    properties = root.get("properties")
    declared = properties if isinstance(properties, Mapping) else {}
    return lambda key: _kinds(declared.get(key), root)


def _kinds(schema: Any, root: Mapping[str, Any]) -> set[str]:
    kinds, todo, followed = set[str](), [schema], set[str]()
    while todo:
        part = todo.pop()
        if not isinstance(part, Mapping):
            continue
        declared, ref = part.get("type"), part.get("$ref")
        if declared is not None:
            kinds |= {kind for kind in _listed(declared) if isinstance(kind, str)}
        elif isinstance(ref, str):
            if ref not in followed:
                todo.append(_referred(ref, root))
            followed.add(ref)
        else:
            values = [part["const"]] if "const" in part else _listed(part.get("enum"))
            kinds |= {_KINDS.get(type(value), "number") for value in values}
            for several in ("anyOf", "oneOf", "allOf"):
                todo += _listed(part.get(several))
    return kinds


_KINDS = {str: "string", type(None): "null"}  # all others are written as JSON


def _listed(given: Any) -> list[Any]:
    if isinstance(given, list | tuple):
        return list(given)
    return [] if given is None else [given]


def _referred(ref: str, root: Mapping[str, Any]) -> Any:
    """What ``#/$defs/NAME`` is; None where nothing is there."""
    at: Any = root
    for step in ref.removeprefix("#").strip("/").split("/"):
        at = at.get(step) if isinstance(at, Mapping) else None
    return at


def _goes_on(text: str, at: int, opened: str, over: str) -> bool:
    """Whether another argument has begun, or may yet, or the call's end may."""
    return text.startswith(opened, at) or may_begin(text, at, opened, over)


def _arguments(text: str, at: int, argument: Callable[[int], Argument | None]) -> tuple[str, int]:
    """A JSON object of the arguments from ``at`` on, still open, and what follows the last one."""
    written, at = "{", skip_space(text, at)
    while (found := argument(at)) is not None:
        key, value, at = found
        comma = ", " if len(written) > 1 else ""
        written += f"{comma}{json.dumps(key, ensure_ascii=False)}: {value}"
        at = skip_space(text, at)
    return written, at


def _typed(value: str, kinds: set[str]) -> str:
    """JSON of a value that is written plainly: a string, unless another type is declared."""
    if value == "null" and "null" in kinds:
        return value
    if kinds and "string" not in kinds:
        try:
            return json.dumps(json.loads(value), ensure_ascii=False, allow_nan=False)
        except (ValueError, RecursionError):
            if value in ("True", "False", "None"):
                return {"True": "true", "False": "false", "None": "null"}[value]
    return json.dumps(value, ensure_ascii=False)
