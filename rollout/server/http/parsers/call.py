"""Tool calls in what a model wrote: what a parser is, and what those of several families share.

A parser is a function of the text so far. While ``final`` is False it leaves out what may yet turn
out to be something else, so that each result is a beginning of the next one and a stream can send
the difference. What does not parse stays text: nothing that the model wrote is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rollout.server.http.parsers.partial_json import before_mark, skip_space


@dataclass(frozen=True, slots=True)
class Call:
    """A function's name, and its arguments as the model wrote them: JSON, maybe cut short.

    ``id``: the model's own, which its template wants to see again; "" where it wrote none.
    """

    name: str
    arguments: str
    id: str = ""


Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of the parameters
Parsed = tuple[str, list[Call]]  # text beside the calls, and the calls
Parse = Callable[[str, bool, Tools], Parsed]
Read = Callable[[str, int], tuple[list[Call], int | None]]  # from a place on, and their end


def tagged(text: str, final: bool, opening: str, closing: str, read: Read) -> Parsed:
    """Calls between tags; white space after one belongs to nobody.

    What is no call yet where its tag closes was sent as text then, and stays that.
    """
    content, calls, at = "", list[Call](), 0
    while (start := text.find(opening, at)) >= 0:
        content += text[at:start]
        close = text.find(closing, start + len(opening))
        stop = len(text) if close < 0 else close + len(closing)
        inside = text[start:stop]
        found, end = read(inside, skip_space(inside, len(opening)))
        if not found:
            if close < 0 and not final:
                return content, calls
            content, at = content + inside, stop
            continue
        if end is None and close >= 0:  # what looks like the closing tag lies in an argument
            inside = text[start:]
            found, end = read(inside, skip_space(inside, len(opening)))
        calls += found
        if end is None:
            return content, calls
        at = skip_space(text, start + end)
        if text.startswith(closing, at):
            at = skip_space(text, at + len(closing))
        elif not final and may_begin(text, at, closing):
            return content, calls
    rest = text[at:]
    return content + (rest if final else before_mark(rest, opening)), calls


def may_begin(text: str, at: int, *marks: str) -> bool:
    """Whether what is left from ``at`` on is shorter than one of the marks, and may become it."""
    return any(mark.startswith(text[at:]) for mark in marks)
