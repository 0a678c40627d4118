"""gpt-oss: an answer is several messages, each in a channel and maybe to somebody.

``<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...``: what
is in the channel "analysis" is thought, and what is sent to "functions.NAME" is a call. The format
is OpenAI's harmony (https://developers.openai.com/cookbook/articles/openai-harmony).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rollout.server.http.parsers.call import Call, Parsed, Tools
from rollout.server.http.parsers.partial_json import before_mark
from rollout.server.http.parsers.reasoning import Decode, ReasoningParser


@dataclass(frozen=True, slots=True, kw_only=True)
class Harmony(ReasoningParser):
    """Calls stay in the answer, for ``openai`` to find.

    ``start`` and ``end`` are what a thought alone, and then an answer, lies between: a grammar
    begins behind them.
    """

    start: str = "<|channel|>analysis<|message|>"
    end: str = "<|channel|>final<|message|>"
    always: bool = True
    special: bool = True

    def split(self, text: str, prompt: str, final: bool) -> tuple[str, str]:
        begun = next((mark for mark in (self.start, self.end) if prompt.endswith(mark)), "")
        messages = list(_messages(begun + text, final))
        thought = "\n".join(m.text.strip() for m in messages if m.is_thought)
        return thought.strip(), _joined(m for m in messages if not m.is_thought)

    def count(self, tokens: Sequence[int], prompt: str, decode: Decode) -> int:
        begun = self.start if prompt.endswith(self.start) else ""
        ends = [m.end for m in _messages(begun + decode(tokens), True) if m.is_thought]
        if not ends:
            return 0
        end = ends[-1] - len(begun)
        return bisect_left(range(len(tokens)), end, key=lambda count: len(decode(tokens[:count])))


def openai(text: str, final: bool, tools: Tools) -> Parsed:
    """``<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>``."""
    messages = list(_messages(text, final))
    calls = [Call(m.function, m.text.strip()) for m in messages if m.function]
    return _joined(m for m in messages if not m.function), calls


_MARKS = ("start", "channel", "constrain", "message", "end", "call", "return")
_MARK = re.compile(rf"<\|({'|'.join(_MARKS)})\|>")
_TO = re.compile(r"\bto=([^\s<]+)")


@dataclass(frozen=True, slots=True)
class _Message:
    """``header``: as it is written; "" of what lies outside of all messages. ``closed``: the mark
    behind it, "" while it is open. ``end``: of all of that, in the text.
    """

    header: str
    text: str
    closed: str
    end: int

    @property
    def recipient(self) -> str:
        found = _TO.search(self.header)
        return found[1] if found else ""

    @property
    def function(self) -> str:
        """What is called; "" where nothing is."""
        named = self.recipient.startswith("functions.")
        return self.recipient.removeprefix("functions.") if named else ""

    @property
    def is_thought(self) -> bool:
        return "<|channel|>analysis" in self.header and not self.recipient

    @property
    def written(self) -> str:
        begin = "" if self.header.startswith("<|") else "<|start|>assistant"
        return f"{begin}{self.header}<|message|>{self.text}{self.closed}"


def _messages(text: str, final: bool) -> Iterator[_Message]:
    """In their order, the last one maybe open."""
    if not final:
        text = min((before_mark(text, f"<|{mark}|>") for mark in _MARKS), key=len)
        if "to=".startswith(text.lstrip()):
            return  # whom the first message is to may stand before its channel
    state, begin, header = "outside", 0, ""
    if text.lstrip().startswith("to="):
        state = "header"
    marks = [(found.start(), found.end(), found[1]) for found in _MARK.finditer(text)]
    for start, end, mark in [*marks, (len(text), len(text), "")]:
        opens, closes = mark in ("start", "channel"), mark in ("end", "call", "return")
        if state == "outside" and (opens or not mark):
            if start > begin:
                yield _Message("", text[begin:start], "", start)
            state, begin = "header", start
        elif state == "header" and mark == "message":
            state, begin, header = "text", end, text[begin:start]
        elif state == "header" and closes:
            state = "outside"  # no message: what it is stays as it is
        elif state == "header" and not mark and final and start > begin:
            yield _Message("", text[begin:], "", end)
        elif state == "text" and opens:
            yield _Message(header, text[begin:start], "<|end|>", start)
            state, begin = "header", start
        elif state == "text" and (closes or not mark):
            yield _Message(header, text[begin:start], text[start:end], end)
            state, begin = "outside", end


def _joined(messages: Iterable[_Message]) -> str:
    """Texts to the user, and what else there is as it is written."""
    return "".join(m.written if m.recipient or m.is_thought else m.text for m in messages)
