"""What a rollout service says about itself."""

from __future__ import annotations

from dataclasses import dataclass

PROTOCOL = 4  # of the gRPC services and the documents in them; peers must have the same
PROTOCOL_KEY = "rollout-protocol"  # the metadata in which a client says its own


def protocol_problem(theirs: object, who: str) -> str | None:
    """What to say to or of a peer that speaks ``theirs``; None if it is ours."""
    said = str(theirs) if isinstance(theirs, int | str) else type(theirs).__name__
    if said == str(PROTOCOL):
        return None
    return (
        f"{who} speaks version {said[:40]} of the protocol, this side version {PROTOCOL}: "
        "install the same version of rollout on both"
    )


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
    protocol: int = PROTOCOL
