"""Grammars that a body asks for by other names: response formats and choices of tools."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollout.errors import InvalidRequest
from rollout.server.http.parsers import ReasoningParser

Grammar = Mapping[str, Any]  # as in ``SamplingParams.structured_outputs``
Schemas = Mapping[str, Mapping[str, Any]]  # name of a tool -> schema of its parameters


def of_response_format(given: Mapping[str, Any] | None) -> Grammar | None:
    """Of OpenAI's ``response_format``; None for text. Raises ``InvalidRequest``."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": given}
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format has no type {kind!r:.80}; use text, json_object, json_schema or "
            "structural_tag"
        )
    named = given.get("json_schema")
    schema = named.get("schema") if isinstance(named, Mapping) else None
    if not isinstance(schema, Mapping):
        raise InvalidRequest("response_format.json_schema needs a schema")
    return {"json": schema}


def of_tools(schemas: Schemas, *, several: bool) -> Grammar:
    """A list of calls, one at least: ``[{"name": ..., "parameters": {...}}]``."""
    calls = []
    definitions: dict[str, Any] = {}
    for name, schema in schemas.items():
        own = dict(_object(schema))
        defined = own.pop("$defs", None) or {}
        if not isinstance(defined, Mapping):
            raise InvalidRequest(f"tool {name!r:.80}: $defs of its parameters must be an object")
        for key, value in defined.items():  # references count from the root
            if definitions.setdefault(key, value) != value:
                raise InvalidRequest(f"two tools define {key!r} in $defs, and differ: rename one")
        fields = {"name": {"const": name}, "parameters": own}
        calls.append({"type": "object", "properties": fields, "required": list(fields)})
    most = {} if several else {"maxItems": 1}
    items = {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}
    schema = {**items, **({"$defs": definitions} if definitions else {})}
    return {"json": schema, "disable_any_whitespace": True}


def of_tool(schema: Mapping[str, Any]) -> Grammar:
    """The arguments of one tool."""
    return {"json": _object(schema), "disable_any_whitespace": True}


def after_thought(grammar: Grammar, reasoning: ReasoningParser, prompt: str) -> Grammar:
    """``grammar`` for what comes after a thought, if the model has one to finish or to begin."""
    if prompt.rstrip().endswith(reasoning.end):
        return grammar
    answer = _format(grammar)
    thought = {"type": "tag", "content": {"type": "any_text"}, "end": reasoning.end}
    spaces = {"type": "regex", "pattern": "\\n{0,2}"}
    if reasoning.begins_inside(prompt):
        whole = _sequence({**thought, "begin": ""}, spaces, answer)
    else:
        begun = _sequence({**thought, "begin": reasoning.start}, spaces, answer)
        whole = {"type": "or", "elements": [begun, answer]}
    return {"structural_tag": {"type": "structural_tag", "format": whole}}


def _object(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    return schema or {"type": "object", "properties": {}}


def _sequence(*parts: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(parts)}


def _format(grammar: Grammar) -> Mapping[str, Any]:
    """As a part of xgrammar's structural tags."""
    if "regex" in grammar:
        return {"type": "regex", "pattern": grammar["regex"]}
    if "grammar" in grammar:
        return {"type": "grammar", "grammar": grammar["grammar"]}
    if "choice" in grammar:
        texts = [{"type": "const_string", "value": text} for text in grammar["choice"]]
        return {"type": "or", "elements": texts}
    if "structural_tag" in grammar:
        inside: Mapping[str, Any] = grammar["structural_tag"].get("format", {})
        return inside
    return {"type": "json_schema", "json_schema": grammar.get("json", {"type": "object"})}
