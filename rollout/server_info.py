"""What a rollout service says about itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerInfo:
    """One engine as its clients see it; lengths are in tokens."""

    model: str  # the name it is served under
    epoch: int
    version: int
    state: str
    max_model_len: int
    has_tokenizer: bool
    package_version: str
