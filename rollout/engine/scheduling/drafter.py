"""What a scheduler asks for tokens that may come next."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from rollout.engine.sequences.sequence import Sequence


class Draft(NamedTuple):
    """``tokens`` after the known ones, -1 where the ranks are to draft them in the step itself.

    ``context``: positions of known tokens that the draft model has to compute for that, and for
    later drafts, in the same step. ``ahead``: it reads the token so far behind each of them.
    """

    tokens: tuple[int, ...] = ()
    context: range = range(0)
    ahead: int = 0


class Drafter(Protocol):
    """Asked by the engine's thread alone, in the order in which sequences run."""

    def begin(self, seq: Sequence) -> None:
        """A sample runs, for the first time or again after a preemption."""

    def finish(self, seq: Sequence) -> None:
        """A sample has ended."""

    def draft(self, seq: Sequence, room: int) -> Draft:
        """For the next step of a sequence that decodes; ``room``: tokens that may be computed."""

    def judge(self, seq: Sequence, drafted: int, accepted: int) -> None:
        """How many tokens of a step's draft were right."""
