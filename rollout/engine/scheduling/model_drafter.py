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
    """

    def __init__(self, most: int, longest: int) -> None:
        self._most, self._longest = most, longest

    def begin(self, seq: Sequence) -> None:
        may = seq.draws and not seq.reads_tokens and seq.image_positions is None
        if seq.drafting is None and may:
            seq.drafting = DraftPace(most=self._most, length=self._most)

    def finish(self, seq: Sequence) -> None:
        seq.drafting = None

    def draft(self, seq: Sequence, room: int) -> Draft:
        pace, known = seq.drafting, seq.num_tokens
        if pace is None or pace.rests():
            return Draft()
        count = min(pace.length, seq.max_len - known - 1, self._longest - known)
        behind = known - seq.num_drafted
        if count < 1 or room < 2:
            return Draft()
        if behind + 1 > room:  # the rest in the next steps
            return Draft(context=range(seq.num_drafted, seq.num_drafted + room))
        return Draft((-1,) * min(count, room - behind), range(seq.num_drafted, known))

    def judge(self, seq: Sequence, drafted: int, accepted: int) -> None:
        if seq.drafting is not None:
            seq.drafting.judge(drafted, accepted)
        # The last token of a draft was given, and not computed.
        seq.num_drafted += min(accepted, drafted - 1)
