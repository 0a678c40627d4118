"""Logs of the command line's processes: one line per event, on stderr, never on stdout."""

from __future__ import annotations

import logging
import sys

FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str = "warning") -> None:
    """Send this process's log to stderr at ``level``; for programs, never called by the library.

    Replaces the handlers an earlier call installed, so calling it twice prints lines once.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, "%H:%M:%S"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    for chatty in ("asyncio", "httpx", "urllib3", "filelock"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, logging.getLogger().level))
