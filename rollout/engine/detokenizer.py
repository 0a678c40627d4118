"""Output token ids to text, one token at a time, and stop strings in that text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rollout.generation import SamplingParams

_CONTEXT = 5  # prompt tokens decoded along, so that a first token knows whether a space leads it
_INCOMPLETE = "\ufffd"


class Decodes(Protocol):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """Grows ``text`` as tokens come; a token that ends inside a character waits for the next.

    The prefix-offset algorithm of text-generation-inference: decode a short window with and
    without the new tokens, and keep the difference. Stop strings are found in new text only.
    """

    __slots__ = ("_ids", "_params", "_prefix", "_read", "_stop", "_tokenizer", "hold", "text")

    def __init__(self, tokenizer: Decodes, prompt: Sequence[int], params: SamplingParams) -> None:
        self._tokenizer = tokenizer
        self._params = params
        self._ids = list(prompt[-_CONTEXT:])
        self._prefix = 0
        self._read = len(self._ids)
        self._stop = params.stop
        longest = max(map(len, params.stop), default=0)
        # Text that may yet turn out to begin a stop string is not shown.
        self.hold = 0 if params.include_stop_str_in_output else max(longest - 1, 0)
        self.text = ""

    def feed(self, token_ids: Sequence[int], *, final: bool = False) -> None:
        """Add tokens; ``final`` shows even the pieces of an incomplete character."""
        self._ids.extend(token_ids)
        window = self._ids[self._prefix :]
        if len(window) == self._read - self._prefix:
            return
        skip = self._params.skip_special_tokens
        decode = self._tokenizer.decode
        old = decode(window[: self._read - self._prefix], skip_special_tokens=skip)
        new = decode(window, skip_special_tokens=skip)
        if final or (len(new) > len(old) and not new.endswith(_INCOMPLETE)):
            self.text += new[len(old) :]
            self._prefix, self._read = self._read, len(self._ids)

    def cut_at_stop(self, new_from: int) -> str | None:
        """The stop string that ends first in the text from ``new_from`` on; ``text`` is cut there.

        ``new_from`` is the length of the text before the last ``feed``.
        """
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            at = self.text.find(stop, max(0, new_from - len(stop) + 1))
            if at >= 0 and (best is None or (at + len(stop), at) < best[:2]):
                best = (at + len(stop), at, stop)
        if best is None:
            return None
        end, at, stop = best
        self.text = self.text[: end if self._params.include_stop_str_in_output else at]
        return stop

    def visible(self, finished: bool) -> str:
        """What may be shown now: all of it once finished, else without the held-back tail."""
        if finished or not self.hold:
            return self.text
        return self.text[: -self.hold]
