"""An assistant's message made of what the model wrote: thought, text and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from rollout.generation import RequestOutput
from rollout.server.http.parsers import Call, Decode, Parse, ReasoningParser

_ID_LENGTH = 9  # of a call, in letters and digits: what Mistral's templates ask for
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Message:
    """``reasoning`` is None where nothing looks for it."""

    content: str = ""
    reasoning: str | None = None
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageReader:
    """How a chat's text is read; without parsers it is the content.

    ``one_call``: only the first counts (``parallel_tool_calls`` false). ``special``: the text must
    keep its special tokens. ``decode``: the text of tokens, with those.
    """

    reasoning: ReasoningParser | None = None
    show_reasoning: bool = True
    calls: Parse | None = None
    tools: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    one_call: bool = False
    special: bool = False
    decode: Decode | None = None

    def thought_tokens(self, output: RequestOutput) -> int | None:
        """How many tokens of all samples are thought; None where nothing looks for it."""
        parser, decode = self.reasoning, self.decode
        if parser is None or decode is None:
            return None
        prompt = output.prompt or ""
        return sum(parser.count(sample.token_ids, prompt, decode) for sample in output.outputs)

    def read(self, text: str, prompt: str, final: bool) -> Message:
        """Of the text so far; each message's parts begin those of the next."""
        thought = None
        if self.reasoning is not None:
            thought, text = self.reasoning.split(text, prompt, final)
            thought = thought if self.show_reasoning else None
        if self.calls is None:
            return Message(text, thought)
        content, calls = self.calls(text, final, self.tools)
        if not content.strip() and (calls or not final):
            content = ""  # white space before a call, or what may turn out to be that
        return Message(content, thought, tuple(calls[:1] if self.one_call else calls))


def whole_message(message: Message, ids: str, role: str = "assistant") -> dict[str, Any]:
    """OpenAI's form; ``reasoning`` is vLLM's name today, ``reasoning_content`` DeepSeek's."""
    made: dict[str, Any] = {"role": role, "content": message.content}
    if message.reasoning is not None:
        made["reasoning"] = made["reasoning_content"] = message.reasoning or None
        made["content"] = message.content or None
    if message.calls:
        made["content"] = message.content or None
        made["tool_calls"] = [
            {"id": call_id(call, ids, number), "type": "function", "function": _function(call)}
            for number, call in enumerate(message.calls)
        ]
    return made


def delta(old: Message, new: Message, ids: str) -> dict[str, Any]:
    """What ``new`` adds to ``old``, as a chunk carries it."""
    made: dict[str, Any] = {}
    if new.reasoning and (thought := new.reasoning[len(old.reasoning or "") :]):
        made["reasoning"] = made["reasoning_content"] = thought
    if text := new.content[len(old.content) :]:
        made["content"] = text
    calls = []
    for number, call in enumerate(new.calls):
        if number >= len(old.calls):
            first = {"index": number, "id": call_id(call, ids, number), "type": "function"}
            calls.append({**first, "function": _function(call)})
        elif more := call.arguments[len(old.calls[number].arguments) :]:
            calls.append({"index": number, "function": {"arguments": more}})
    if calls:
        made["tool_calls"] = calls
    return made


def call_id(call: Call, ids: str, number: int) -> str:
    """The same in every chunk of an answer: the model's own, or a function of the answer's id and
    the call's number.
    """
    if call.id:
        return call.id
    value = int.from_bytes(blake2b(f"{ids}/{number}".encode(), digest_size=8).digest(), "little")
    return "".join(_LETTERS[value // 36**place % 36] for place in range(_ID_LENGTH))


def _function(call: Call) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}
