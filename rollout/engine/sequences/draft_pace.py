"""How many tokens are drafted for a sequence, by how its last draft went."""

from __future__ import annotations

from dataclasses import dataclass, field

_LONGEST_WAIT = 8  # steps


@dataclass(slots=True, kw_only=True)
class DraftPace:
    """``length``: of the next draft, at most ``most``; ``waits``: for how many steps there is none
    now, and ``next_wait`` for how many after the next draft that is all wrong, ``first_wait`` after
    one that was not.
    """

    most: int
    length: int
    first_wait: int = 1
    waits: int = 0
    next_wait: int = field(init=False)

    def __post_init__(self) -> None:
        self.next_wait = self.first_wait

    def rests(self) -> bool:
        """Whether there is no draft in this step; asked once in each."""
        if not self.waits:
            return False
        self.waits -= 1
        return True

    def judge(self, drafted: int, accepted: int) -> None:
        """The next draft is longer, as long as would have done, or comes later, each time twice as
        late.
        """
        if accepted == drafted:
            self.length = min(self.most, max(self.length, drafted) + 2)
        else:
            self.length = max(1, accepted)
        if accepted:
            self.waits, self.next_wait = 0, self.first_wait
        else:
            self.waits = self.next_wait
            self.next_wait = min(max(2 * self.waits, 1), _LONGEST_WAIT)
