"""Drafts by a model: which of its tokens the ranks compute when."""

from __future__ import annotations

from rollout.engine.scheduling.drafter import Draft
from rollout.engine.sequences.draft_pace import DraftPace
from rollout.engine.sequences.sequence import Sequence


class ModelDrafter:
    """At most ``most`` tokens for sequences of at most ``longest`` tokens, which the draft model
    draws in the step that verifies them.

    That model computes a sequence's tokens when it is to draft for it, all that it has not computed
    yet: a sequence that decodes beside too many others costs it nothing. ``num_drafted`` of a
    sequence says up to where its keys and values are there.

    ``is_head``: it is a prediction head, which reads at each position what the policy made of that
    and the token after it. At its last one that is the last known token; where it goes on behind
    its own drafts, it reads its own states, and computes these positions again once the policy has
    given others.
    """

    def __init__(self, most: int, longest: int, *, is_head: bool = False) -> None:
        self._most, self._longest, self._ahead = most, longest, int(is_head)

    def begin(self, seq: Sequence) -> None:
        may = seq.draws and not seq.reads_tokens and seq.visual_positions is None
        if seq.drafting is None and may:
            # One that is wrong says little of the next: a second one has to be.
            seq.drafting = DraftPace(most=self._most, length=self._most, first_wait=0)

    def finish(self, seq: Sequence) -> None:
        seq.drafting = None

    def draft(self, seq: Sequence, room: int) -> Draft:
        pace, known = seq.drafting, seq.num_tokens
        if pace is None or pace.rests():
            return Draft()
        count = min(pace.length, seq.max_len - known - 1, self._longest - known)
        stop = known - self._ahead
        start = min(seq.num_drafted, stop - 1)  # what it says there is wanted
        if count < 1 or room < 2:
            return Draft()
        if stop - start + 1 > room:  # the rest in the next steps
            return Draft(context=range(start, start + room), ahead=self._ahead)
        tokens = (-1,) * min(count, room - (stop - start))
        return Draft(tokens, range(start, stop), self._ahead)

    def judge(self, seq: Sequence, drafted: int, accepted: int) -> None:
        if seq.drafting is not None:
            seq.drafting.judge(drafted, accepted)
        if not self._ahead:
            # The last token of a draft was given, and not computed.
            seq.num_drafted += min(accepted, drafted - 1)
