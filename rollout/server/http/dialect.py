"""What a dialect is: routes under a client's own names, and the shape that its errors have.

A dialect translates bodies, answers and errors of one family of clients, and owns no state (but
Tinker's futures, which its protocol asks for): the verbs are those of ``rollout.api`` and of the
engine's one session. The table is ``app.DIALECTS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollout.server.http.errors import ErrorShape, openai_shape
from rollout.server.http.guard import Routes


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """``error``: (path, message, kind, status) to a JSON body and a status."""

    name: str
    routes: Routes
    error: ErrorShape = openai_shape


def shapes_of(dialects: Sequence[Dialect]) -> dict[str, ErrorShape]:
    """The shape of errors at each path; elsewhere it is OpenAI's."""
    return {path: dialect.error for dialect in dialects for path in dialect.routes.paths}
