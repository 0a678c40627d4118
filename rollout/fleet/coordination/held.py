"""What all members of a fleet are held in."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Held:
    """``asleep``: the tags that were given up."""

    paused: bool = False
    asleep: frozenset[str] = frozenset()

    @property
    def state(self) -> str:
        """As a member says it; "" where nothing holds it."""
        return "asleep" if self.asleep else "paused" if self.paused else ""
