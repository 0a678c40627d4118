"""The text that a version may be labelled with."""

from __future__ import annotations

from rollout.errors import ConfigError

MAX_LABEL = 4096  # characters


def check_label(label: str) -> None:
    """``ConfigError`` unless it can be sent: half a surrogate pair cannot."""
    try:
        fits = len(label) <= MAX_LABEL and label.encode() is not None
    except UnicodeEncodeError:
        fits = False
    if not fits:
        raise ConfigError(f"label must be text of at most {MAX_LABEL} characters, in UTF-8")
