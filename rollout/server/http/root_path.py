"""The path under which a proxy has put the server."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from rollout.errors import ConfigError


def check_root_path(path: str) -> None:
    """Raises ``ConfigError`` for what is no prefix of a path ("" is none)."""
    if path and (not path.startswith("/") or path.endswith("/")):
        raise ConfigError(f"--root-path {path!r}: give a path as /rollout, or leave it out")


class RootPath:
    """An ASGI application that also answers under ``path``: a proxy may leave it in what it
    forwards, or take it out. What comes behind, the guard too, sees paths without it.
    """

    def __init__(self, app: ASGIApp, path: str) -> None:
        self._app, self._path = app, path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if self._path and (path == self._path or path.startswith(f"{self._path}/")):
            scope = {**scope, "path": path.removeprefix(self._path) or "/"}
        await self._app(scope, receive, send)
