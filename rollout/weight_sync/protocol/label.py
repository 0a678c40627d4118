"""The text that a version may be labelled with."""

from __future__ import annotations

from rollout.errors import ConfigError

MAX_LABEL = 4096  # characters


def check_label(label: str) -> None:
    try:
        label.encode()
    except UnicodeEncodeError:  # half a surrogate pair
        label = "x" * (MAX_LABEL + 1)
    if len(label) > MAX_LABEL:
        raise ConfigError(f"label must be text of at most {MAX_LABEL} characters, in UTF-8")
