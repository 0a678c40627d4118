"""A recurrent state that drafts are computed by, as long as nobody knows whether they are right."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Trial:
    """The state in ``slot`` goes on from the sequence's own over positions ``start`` to ``stop``,
    the last of which are drafts. Its own stays what it was at ``start``.
    """

    slot: int
    start: int
    stop: int
