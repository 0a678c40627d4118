"""Tool calls that are written as calls of Python; they are known when they are whole."""

from __future__ import annotations

import ast
import json
from typing import Any

from rollout.server.http.parsers.call import Call, Parsed, Tools, tagged


def pythonic(text: str, final: bool, tools: Tools) -> Parsed:
    """The whole answer is ``[NAME(KEY=VALUE, ...), ...]``: Llama 3.2; known when it is whole."""
    if not text.lstrip().startswith("[") and text.strip():
        return text, []
    made = _calls(text) if final else None
    return (text, []) if final and not made else ("", made or [])


def llama4_pythonic(text: str, final: bool, tools: Tools) -> Parsed:
    """As ``pythonic``, maybe between ``<|python_start|>`` and ``<|python_end|>``."""
    said = text.lstrip()
    if not final and _START.startswith(said):
        return "", []
    if not said.startswith(_START):
        return pythonic(text, final, tools)
    inner, _, rest = said.removeprefix(_START).partition(_END)
    calls = pythonic(inner, final, tools)[1]
    content = rest.lstrip() if calls else text
    return (content if final else ""), calls


def olmo3(text: str, final: bool, tools: Tools) -> Parsed:
    """``NAME(KEY=VALUE, ...)`` on lines between ``<function_calls>`` and its end; as JSON has it
    or as Python has it, ``true`` or ``True``.
    """

    def read(text: str, at: int) -> tuple[list[Call], int | None]:
        end = text.find(_CLOSE, at)
        body = text[at:] if end < 0 else text[at:end]
        if end < 0 and not final:
            return [], None
        calls = _calls(body, "exec") or []
        return calls, None if end < 0 or not calls else end

    return tagged(text, final, _OPEN, _CLOSE, read)


_START, _END = "<|python_start|>", "<|python_end|>"
_OPEN, _CLOSE = "<function_calls>", "</function_calls>"
_JSON_NAMES = {"true": True, "false": False, "null": None}


class _Constants(ast.NodeTransformer):
    def visit_Name(self, node: ast.Name) -> ast.expr:
        known = node.id in _JSON_NAMES
        return ast.Constant(_JSON_NAMES[node.id]) if known else node


def _calls(text: str, mode: str = "eval") -> list[Call] | None:
    """Those of a list, or ("exec") of one line each; None where it is something else."""
    try:
        tree: Any = ast.parse(text.strip(), mode=mode)
        if mode == "exec":
            return [_call(line.value) for line in tree.body]
        return [_call(node) for node in tree.body.elts]
    except (SyntaxError, ValueError, TypeError, AttributeError, MemoryError, RecursionError):
        return None  # also where a value is none of JSON's


def _call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by keywords")
    given = {str(k.arg): ast.literal_eval(_Constants().visit(k.value)) for k in node.keywords}
    return Call(ast.unparse(node.func), json.dumps(given, ensure_ascii=False, allow_nan=False))
