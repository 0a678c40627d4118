"""What the samples of one prompt say, and after which runs of tokens they go on where."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from weakref import ref

from rollout.engine.sequences.draft_pace import DraftPace

_MOST_BEFORE = 4  # texts of one prompt that a draft is looked for in
_BITS = 40  # of a place: above them the part, below them where the text goes on


class Texts:
    """A prompt and, under numbers, what samples that ran together said; looked up by the last
    tokens of one of them.

    ``lengths``: how many last tokens, the longest first. Runs are known by their hash: where two
    have the same, what is found is as wrong as any other guess. What came is looked through when
    somebody drafts. ``previous``: those of the same prompt before, for as long as somebody holds
    them. ``num_tokens``: of the prompt and of what was taken over of each sample; ``running``: how
    many samples have not ended.
    """

    __slots__ = (
        *("__weakref__", "_behind", "_lengths", "_parts", "_places", "_previous", "_prompt_len"),
        *("_seen", "num_tokens", "running"),
    )

    def __init__(self, lengths: range, prompt: array[int], previous: Texts | None = None) -> None:
        self._lengths, self._prompt_len = lengths, len(prompt)
        self._parts = [prompt]
        self._seen = [1]  # up to where each text was looked through
        self._behind = deque((0,))  # parts that grow no more, and were not to their end
        self._places: dict[int, int] = {}
        self._previous = None if previous is None else ref(previous)
        self.num_tokens, self.running = len(prompt), 0

    def join(self) -> int:
        """The number of one more sample."""
        self.running += 1
        self._parts.append(array("q"))
        self._seen.append(self._prompt_len)
        return len(self._parts) - 1

    def extend(self, number: int, tokens: list[int]) -> int:
        """Take over what is new of a sample's ``tokens``, which begin with the prompt; how many."""
        part = self._parts[number]
        before = len(part)
        part.extend(tokens[self._prompt_len + before :])
        self.num_tokens += len(part) - before
        return len(part) - before

    def end(self, number: int) -> None:
        """A sample says no more."""
        self.running -= 1
        self._behind.append(number)

    def look_through(self, number: int, most: int) -> None:
        """At most so many tokens: first what has ended, then what sample ``number`` has said."""
        for texts in self._chain():
            behind = texts._behind
            while behind and most:
                most -= texts._look_through(behind[0], most)
                if most:
                    behind.popleft()
        self._look_through(number, most)

    def follow(self, number: int, count: int) -> list[int]:
        """Up to ``count`` tokens that came, the last time, after a sample's last ones."""
        stop = self._prompt_len + len(self._parts[number])
        for length in self._lengths:
            run = hash(tuple(self._tokens(number, stop - length, stop)))
            for texts in self._chain():
                if (place := texts._places.get(run)) is None:
                    continue
                other, end = place >> _BITS, place & ((1 << _BITS) - 1)
                if texts is not self or other not in (0, number):
                    return texts._tokens(other, end, end + count)
                found = self._tokens(number, end, end + count)
                while len(found) < count:  # it repeats itself
                    found += found[: count - len(found)]
                return found
        return []

    def _chain(self) -> Iterator[Texts]:
        """These, and those before, the newest first."""
        texts: Texts | None = self
        for _ in range(_MOST_BEFORE):
            if texts is None:
                return
            yield texts
            texts = None if texts._previous is None else texts._previous()

    def _look_through(self, number: int, most: int) -> int:
        start, places, place = self._seen[number], self._places, number << _BITS
        stop = self._prompt_len + (len(self._parts[number]) if number else 0)
        stop = max(start, min(stop, start + most))
        first = max(0, start - self._lengths[0])
        tokens = self._tokens(number, first, stop)
        for length in self._lengths:
            for end in range(max(start, length) - first, stop - first):
                places[hash(tuple(tokens[end - length : end]))] = place | (first + end)
        self._seen[number] = stop
        return stop - start

    def _tokens(self, number: int, start: int, stop: int) -> list[int]:
        prompt, own = self._prompt_len, self._parts[number]
        if start >= prompt:
            return own[start - prompt : stop - prompt].tolist()
        found = self._parts[0][max(start, 0) : stop].tolist()
        return found + own[: stop - prompt].tolist() if number and stop > prompt else found


@dataclass(slots=True, kw_only=True)
class TextPace(DraftPace):
    """Of a sequence whose text is that of ``number``."""

    texts: Texts
    number: int
