"""What two peers speak, and what a rollout service says about itself.

Peers agree on the newest version of the protocol that both speak. Fields that were added to a noun
within a version (``codec.added``) do not travel at their defaults, and ``FEATURES`` names what can
be asked for by others; so that trainers and engines need not be of one version of this package, nor
of torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from rollout.errors import ConfigError

OLDEST, PROTOCOL = 5, 5  # versions of the gRPC services and the documents in them
# Beyond what version 5 began with.
FEATURES = (
    *("cards", "cells", "codes", "components", "continued", "continued_chats", "fleets"),
    *("floors", "fronts", "images", "intervals", "kv", "late_labels", "limits", "merged"),
    *("multiplex", "prepare", "regions", "relays", "removals", "repeats", "resets", "returns"),
    *("score", "sessions", "shares", "sleep_modes", "video_files", "videos"),
)
PROTOCOL_KEY = "rollout-protocol"  # the metadata in which a client says its range, "5" or "5-7"
SOFTWARE_KEY = "rollout-software"  # and its packages, which errors name


@cache  # read from files, and said with every answer
def _software() -> str:
    found = []
    for package in ("rollout", "torch"):
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return ", ".join(found)


@dataclass(frozen=True, slots=True)
class Speaks:
    """The versions of the protocol that a peer speaks, and its ``software``, for errors."""

    oldest: int = OLDEST
    newest: int = PROTOCOL
    software: str = ""

    @classmethod
    def here(cls) -> Speaks:
        return cls(software=_software())

    @classmethod
    def read(cls, said: str, software: str = "") -> Speaks:
        """From a ``range``, as metadata has it; what is none is a version that nobody has."""
        found = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", said)
        if found is None:
            return cls(-1, -1, said[:40])
        return cls(int(found[1]), int(found[2] or found[1]), software[:80])

    @property
    def range(self) -> str:
        one = self.oldest == self.newest
        return str(self.newest) if one else f"{self.oldest}-{self.newest}"

    def __str__(self) -> str:
        one = self.oldest == self.newest
        range = f"version {self.newest}" if one else f"versions {self.oldest} to {self.newest}"
        return f"{range} of the protocol" + (f" ({self.software})" if self.software else "")


def agreed(theirs: Speaks, who: str) -> int:
    """The newest version that both speak; ``ConfigError`` names both sides' where there is none."""
    common = min(theirs.newest, PROTOCOL)
    if common < max(theirs.oldest, OLDEST):
        raise ConfigError(
            f"{who} speaks {theirs}, this side {Speaks.here()}: install versions of rollout that "
            "have one in common"
        )
    return common


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
    world_size: int  # ranks
    protocol: int = PROTOCOL  # the newest that it speaks
    oldest_protocol: int = OLDEST  # 0: no other
    features: tuple[str, ...] = FEATURES
    software: str = ""  # its packages
    task: str = ""  # "classify": it has a score head in the place of a language model's
    settings: str = ""  # JSON of those beside the defaults that decide what its layers compute

    @property
    def speaks(self) -> Speaks:
        return Speaks(self.oldest_protocol or self.protocol, self.protocol, self.software)
