"""What a coordinator asks to have done; whoever does it says how it went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollout.weight_sync.protocol.adapters import HeldAdapter
from rollout.weight_sync.protocol.membership import Grant
from rollout.weight_sync.protocol.messages import Decision

Adapters = tuple[HeldAdapter, ...]


MAX_LEASE = 3600.0  # seconds; a longer one is a mistake


@dataclass(frozen=True, slots=True, kw_only=True)
class Promise:
    """What is durable before anybody may act on it.

    ``fence`` grows with every coordinator that takes the record over. (``epoch``, ``version``) is
    what the fleet serves, by the update ``update_id``, with weights of ``digest``. ``before``: the
    digest that a rollback leads to, 0 where there is none. ``adapters``: those that are in
    ``digest``; ``adapters_before``: in ``before``. ``fleet``: which one it is, whatever becomes of
    its epochs; 0 where nobody has said.
    """

    fence: int
    epoch: int
    version: int
    digest: int
    update_id: str = ""
    before: int = 0
    lease: float = 0.0  # the longest that any of them may have granted, in seconds
    adapters: Adapters = ()
    adapters_before: Adapters = ()
    fleet: int = 0


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a member its grant; then ``stood``, or ``silent``."""

    member: str
    grant: Grant


@dataclass(frozen=True, slots=True)
class Tell:
    """Send a member its decision; then ``decided``."""

    member: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Check:
    """Read the digest of all that a member holds; then ``checked``, or ``silent``."""

    member: str


@dataclass(frozen=True, slots=True)
class Fill:
    """Bring a member to ``version``, the ``donor``'s live one; then ``checked`` or ``unfilled``."""

    member: str
    donor: str
    version: int


@dataclass(frozen=True, slots=True)
class Write:
    """Make this durable; then ``written``. Nothing else may be promised meanwhile."""

    promise: Promise


@dataclass(frozen=True, slots=True)
class Ended:
    """Answer the trainer: an update is live on every member that serves, or on none. ``lost``: who
    began it and does not hold it, and why.
    """

    update_id: str
    committed: bool
    reason: str = ""
    lost: Mapping[str, str] = field(default_factory=dict)


Action = Ask | Tell | Check | Fill | Write | Ended
