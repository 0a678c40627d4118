"""Commits of adapters alone, which leave what does not use them as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from rollout.engine.sequences.sequence import Sequence

KEPT = 1024  # commits; one that is older counts for every sequence


class AdapterCommits:
    """How far a sequence is behind, by the commits that changed what it uses.

    For the engine's thread alone.
    """

    def __init__(self) -> None:
        # The version, how many numbers above the one before, and the adapters' names.
        self._commits: deque[tuple[int, int, frozenset[str]]] = deque(maxlen=KEPT)
        self._last = 0

    def note(self, version: int, adapters: Collection[str] | None) -> None:
        """A commit of ``adapters`` alone; None: of the models, which counts for all."""
        if adapters is not None:
            self._commits.append((version, version - self._last, frozenset(adapters)))
        self._last = version

    def staleness(self, seq: Sequence, live: int) -> int:
        """How many versions its oldest token is behind ``live``, but for other adapters' ones."""
        behind = seq.staleness(live)
        oldest = live - behind
        name = None if seq.adapter is None else seq.adapter.name
        for version, numbers, names in reversed(self._commits):
            if version <= oldest:
                break
            if version <= live and name not in names:
                behind -= numbers
        return max(behind, 0)
