"""How models write what they think, and calls of tools: by the names that servers know."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rollout.server.http.parsers.call import Call as Call
from rollout.server.http.parsers.call import Parse as Parse
from rollout.server.http.parsers.harmony import Harmony, openai
from rollout.server.http.parsers.json_calls import (
    deepseek_v3,
    deepseek_v31,
    granite,
    hermes,
    kimi_k2,
    llama3_json,
    mistral,
    nemotron_json,
)
from rollout.server.http.parsers.json_calls import named as named
from rollout.server.http.parsers.json_calls import required as required
from rollout.server.http.parsers.python_calls import llama4_pythonic, olmo3, pythonic
from rollout.server.http.parsers.reasoning import Decode as Decode
from rollout.server.http.parsers.reasoning import ReasoningParser as ReasoningParser
from rollout.server.http.parsers.xml_calls import deepseek_v32, glm45, minimax_m2, qwen3_coder


@dataclass(frozen=True, slots=True)
class ToolParser:
    """``special``: marks of the format may be special tokens, which the text has to keep."""

    parse: Parse
    special: bool = True


#: vLLM's names
TOOL_PARSERS: Mapping[str, ToolParser] = {
    "deepseek_v3": ToolParser(deepseek_v3),
    "deepseek_v31": ToolParser(deepseek_v31),
    "deepseek_v32": ToolParser(deepseek_v32),
    "glm45": ToolParser(glm45),
    "glm47": ToolParser(glm45),
    "granite": ToolParser(granite),
    "granite4": ToolParser(hermes),
    "hermes": ToolParser(hermes),
    "kimi_k2": ToolParser(kimi_k2),
    "llama3_json": ToolParser(llama3_json, special=False),
    "llama4_json": ToolParser(llama3_json, special=False),
    "llama4_pythonic": ToolParser(llama4_pythonic),
    "minimax_m2": ToolParser(minimax_m2),
    "mistral": ToolParser(mistral),
    "nemotron_json": ToolParser(nemotron_json),
    "olmo3": ToolParser(olmo3),
    "openai": ToolParser(openai),
    "pythonic": ToolParser(pythonic, special=False),
    "qwen3_coder": ToolParser(qwen3_coder),
    "qwen3_xml": ToolParser(qwen3_coder),
}

_THINK = ReasoningParser()

#: vLLM's names
REASONING_PARSERS: Mapping[str, ReasoningParser] = {
    "deepseek_r1": ReasoningParser(always=True),
    "deepseek_v3": _THINK,
    "glm45": _THINK,
    "glm47": _THINK,
    "kimi_k2": _THINK,
    "minimax_m2": _THINK,
    "mistral": ReasoningParser(start="[THINK]", end="[/THINK]", special=True),
    "olmo3": _THINK,
    "openai_gptoss": Harmony(),
    "qwen3": _THINK,
}
