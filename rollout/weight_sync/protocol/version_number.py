"""Which number the version of an update gets."""

from __future__ import annotations

from rollout.errors import ConfigError, VersionConflict

MAX_VERSION = 1 << 53  # exact in every JSON reader
MAX_NAMED = 1 << 52  # no counting on from there comes to the other


def next_version(named: int | None, live: int) -> int:
    """The version that an update makes: the one it ``named``, or the one after ``live``.

    ``VersionConflict`` where that is not above ``live``, ``ConfigError`` for a jump so high that
    none could be named after it.
    """
    version = live + 1 if named is None else named
    if version <= live:
        raise VersionConflict(f"version {version} is not above the live version {live}")
    if version > max(MAX_NAMED, live + 1):
        raise ConfigError(
            f"version must be at most {MAX_NAMED}, or one above the live version {live}, so that "
            f"others can follow; got {version}"
        )
    return version
