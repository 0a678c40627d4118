"""Drafts of a sequence's next tokens: what came after its last ones where they stood before.

Prompt lookup decoding (Saxena 2023; vLLM's and SGLang's "ngram"): no draft model runs. What is
looked through are the sequence's own tokens and those of every other sample of its prompt: those
that run or have run beside it, since a group's samples say many things alike, and, as far as they
are kept, those of earlier calls: what a policy says this epoch, it mostly said in the last one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from hashlib import blake2b
from weakref import WeakValueDictionary

from rollout.engine.scheduling.drafter import Draft
from rollout.engine.sequences.sequence import Sequence
from rollout.engine.sequences.texts import TextPace, Texts

_AT_ONCE = 512  # tokens that a step looks through for one sequence: long ones hold up no step
_MOST_OF_ONE = 1 << 18  # tokens of one prompt's samples, where one always runs


class NgramDrafter:
    """Drafts at most ``most`` tokens, by the last ``longest`` to ``shortest`` ones of a sequence.

    A longer run of equal tokens is preferred to a shorter one, then the newest. How many are
    drafted for a sequence follows how its last draft went. ``history``: how many of the newest
    tokens are kept; without, what samples said goes with the last one of their prompt that runs.
    """

    def __init__(self, most: int, shortest: int, longest: int, history: int = 0) -> None:
        self.most, self._history = most, history
        self._lengths = range(longest, shortest - 1, -1)
        self._texts: WeakValueDictionary[bytes, Texts] = WeakValueDictionary()
        self._kept: OrderedDict[Texts, None] = OrderedDict()
        self._num_kept = 0  # tokens of those

    def begin(self, seq: Sequence) -> None:
        """A sample runs: from now on it has a place among those of its prompt."""
        if seq.drafting is None and seq.draws and not seq.reads_tokens:
            texts = self._texts_of(seq)
            seq.drafting = TextPace(
                texts=texts, number=texts.join(), most=self.most, length=self.most
            )

    def finish(self, seq: Sequence) -> None:
        """A sample has ended: others draft from all that it said, also where too many decoded for
        drafts of its own.
        """
        pace, seq.drafting = seq.drafting, None
        if isinstance(pace, TextPace):
            self._extend(pace, seq)
            pace.texts.end(pace.number)
            self._forget()

    def draft(self, seq: Sequence, room: int) -> Draft:
        """At most ``room`` tokens that may come after the known ones; none where nothing is found,
        and for some steps after drafts that were all wrong.
        """
        pace = seq.drafting
        if not isinstance(pace, TextPace):
            return Draft()
        self._extend(pace, seq)
        pace.texts.look_through(pace.number, _AT_ONCE)
        count = min(pace.length, room, seq.max_len - seq.num_tokens - 1)
        if pace.rests() or count < 1:
            return Draft()
        return Draft(tuple(pace.texts.follow(pace.number, count)))

    def judge(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """How the draft of a step went."""
        if seq.drafting is not None:
            seq.drafting.judge(drafted, accepted)

    def _extend(self, pace: TextPace, seq: Sequence) -> None:
        new = pace.texts.extend(pace.number, seq.token_ids)
        if pace.texts in self._kept:
            self._num_kept += new

    def _texts_of(self, seq: Sequence) -> Texts:
        prompt = array("q", seq.token_ids[: seq.prompt_len])
        key = blake2b(prompt.tobytes(), digest_size=16).digest()
        found = self._texts.get(key)
        if found is None or not found.running or found.num_tokens > _MOST_OF_ONE:
            found = self._texts[key] = Texts(self._lengths, prompt, found)
            if self._history:
                self._kept[found] = None
                self._num_kept += found.num_tokens
                self._forget()
        return found

    def _forget(self) -> None:
        while self._num_kept > self._history:
            self._num_kept -= self._kept.popitem(last=False)[0].num_tokens
