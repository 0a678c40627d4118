"""Logs of the command line's processes, and times of named parts of a program."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str = "warning") -> None:
    """Send this process's log to stderr; for programs, never called by the library.

    Ours from ``level`` on, other libraries' (grpc, asyncio, uvicorn ...) warnings and errors.
    Replaces the handlers an earlier call installed, so calling it twice prints lines once.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    ours = getattr(logging, level.upper())
    logging.basicConfig(level=max(logging.WARNING, ours), handlers=[handler], force=True)
    logging.getLogger("rollout").setLevel(ours)
