"""Warns of directories that a follower never reads, because of their numbers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.versions.reader import MANIFEST
from rollout.weights.files import KINDS, Written, weight_files

_IN_TURN = 32  # directories whose files are looked at again each time
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A directory that is, or will be, a version."""

    version: int
    path: Path


class PassedOver:
    """What is numbered at or below the live version: once of each that a trainer may miss."""

    def __init__(self) -> None:
        self._followed = 0  # the newest version that came from here
        self._taken: Path | None = None  # the last one whose number was warned of
        self._seen: dict[Path, Written] | None = None  # weights' files, by directory
        self._turn = 0  # whose are looked at next
        self._late: set[Path] = set()  # those that were warned of as written too late

    def start_anew(self) -> None:
        """Elsewhere: nothing has come from there yet, and all that is there is no news."""
        self._followed, self._seen = 0, None

    def has_followed(self, candidate: Candidate) -> None:
        """It is live now."""
        self._followed = candidate.version
        if self._seen is not None:
            self._seen[candidate.path] = _written(candidate.path)

    def warn_of_taken(self, candidate: Candidate, info: WeightInfo) -> None:
        """Where it is the newest one, and another commit has taken its number."""
        if (candidate.version, candidate.path.name) == (info.version, info.label):
            self._followed = info.version  # a front's before this one took it
        if candidate.version <= self._followed or candidate.path == self._taken:
            return
        self._taken = candidate.path
        log.warning(
            "%s is not read: version %d is live already, by another commit (of weights or of an "
            "adapter), and only what is numbered above it is followed: write it as %d or later",
            candidate.path, info.version, info.version + 1,
        )  # fmt: skip

    def warn_of_late(self, candidates: Sequence[Candidate], info: WeightInfo) -> None:
        """Of those whose weights were written when a number as high as their own had been
        followed, as by a trainer that began anew. ``candidates``: the newest first, at every look.
        """
        before, self._seen = self._seen, {}
        self._late &= {candidate.path for candidate in candidates}
        self._turn += _IN_TURN
        for index, candidate in enumerate(candidates):
            path, known = candidate.path, (before or {}).get(candidate.path)
            is_due = (self._turn - index) % len(candidates) < _IN_TURN
            is_due = is_due or candidate.version > info.version  # what this look may pass over
            seen = known if known is not None and not is_due else _written(path, known)
            self._seen[path] = seen
            passed = candidate.version <= min(info.version, self._followed)
            is_known = before is None or _read(seen) <= (known or set())
            if is_known or not passed or path in self._late:
                continue
            self._late.add(path)
            log.warning(
                "%s is not read: it was written after version %d had come from here, and only what "
                "is numbered above the live version, %d, is followed. A trainer that begins anew "
                "numbers on from there, or writes into another directory, for a service that is "
                "started with that one; update_weights(server_path=...) takes this one by hand",
                path, self._followed, info.version,
            )  # fmt: skip


def _written(path: Path, known: Written | None = None) -> Written:
    """The files of a directory that may hold weights; ``known`` where it cannot be looked at."""
    try:
        return weight_files(path, MANIFEST)
    except OSError:
        return known or frozenset()


def _read(written: Written) -> Written:
    """Those that are read, by their kind: others are what a trainer goes on from."""
    for pattern in (pattern for kind in KINDS for pattern in kind.patterns):
        if found := frozenset(one for one in written if fnmatch(one[0], pattern)):
            return found
    return written
