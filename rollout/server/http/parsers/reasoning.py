"""What a model thought before it answered, by the marks of its family."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rollout.server.http.parsers.partial_json import before_mark

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningParser:
    """``always``: an answer begins inside the thought, unless the prompt has closed one.

    Without it, it does where the prompt ends with ``start``. ``special``: the marks are special
    tokens, which the text has to keep.
    """

    start: str = "<think>"
    end: str = "</think>"
    always: bool = False
    special: bool = False

    def split(self, text: str, prompt: str, final: bool) -> tuple[str, str]:
        """(thought, answer) of the text so far, without marks.

        Each part is a beginning of what it is for a longer text: what may yet be a mark, and white
        space around one, is held back until ``final``. A thought that never ends is no answer.
        """
        said = text.lstrip()
        if not final and len(said) < len(self.start) and self.start.startswith(said):
            return "", ""
        if said.startswith(self.start):
            thought = said[len(self.start) :]
        elif self.begins_inside(prompt):
            thought = text
        else:
            return "", text
        thought, ended, answer = thought.partition(self.end)
        if not ended and not final:
            thought = before_mark(thought, self.end)
        return thought.strip(), answer.lstrip()

    def count(self, tokens: Sequence[int], prompt: str, decode: Decode) -> int:
        """How many of ``tokens`` are thought, with its marks; ``decode`` keeps special ones."""
        text = decode(tokens)
        if not text.lstrip().startswith(self.start) and not self.begins_inside(prompt):
            return 0
        if self.end not in text:
            return len(tokens)
        return (
            bisect_left(
                range(1, len(tokens)), True, key=lambda count: self.end in decode(tokens[:count])
            )
            + 1
        )

    def begins_inside(self, prompt: str) -> bool:
        """Whether what follows ``prompt`` is thought."""
        if self.always:
            return not prompt.rstrip().endswith(self.end)
        return prompt.rstrip().endswith(self.start)
