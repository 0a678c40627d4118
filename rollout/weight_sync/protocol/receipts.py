"""The receipt of an update: what was sent, and proof of what the ranks hold since its commit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollout.wire.codec import ADDED, Count, Digest, Many, Seconds, Table, Text


@dataclass(frozen=True, slots=True)
class RankReceipt:
    """What one engine rank has held since the commit of ``version``.

    Read from its memory through the layouts, before the vote if the commit moves no bytes (the two
    instances change places, or the load went into the live one). A commit that moves bytes
    (contents exchanged with host memory, or under captured graphs) reads all ranks again before a
    step runs, and is undone unless they hold the same.
    """

    rank: Count
    version: Count
    digest: Digest  # of everything this rank holds, 64 bits
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentReceipt:
    """What a receipt says of one component: the sum of its digests, and what was sent of it."""

    digest: Digest
    num_tensors: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReceipt:
    """What a receipt says of one adapter: ``name@version``, its digest, and what was sent."""

    version: Count
    digest: Digest
    num_tensors: Count
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateReceipt:
    """Proof of one committed update; equal on every trainer rank.

    ``digest`` is the sum over tensors of their 64-bit digests, of the trainer's values in the
    engine's dtype; the commit was refused unless every rank held exactly that. ``num_bytes``
    counts the tensors once, ``wire_bytes`` what left the sender.

    ``timings``, all in seconds; they overlap, as the parts of an update do. By the sender's clock:
    gather, in the source, and transfer, in handing buckets over and waiting for them. By the
    engine's: stage, the slowest rank's loading; verify, the vote with its digests; commit, from
    asking for it to its end; stall, in which no step could run; total, from the lease to the end of
    the commit. Of a rollback: stall and total.

    ``components``: by name, those that were sent; of an engine that has others than the policy.
    ``adapters``: by name, those that were sent, or that a rollback brought back.
    """

    version: Count
    epoch: Digest
    digest: Digest
    num_tensors: Count
    num_bytes: Count
    wire_bytes: Count
    timings: Table[Seconds]
    ranks: Many[RankReceipt]
    update_id: Text = ""
    transport: Text = ""
    label: Text | None = None
    details: Table[Any] = field(default_factory=dict)
    components: Table[ComponentReceipt] = field(default_factory=dict, metadata=ADDED)
    adapters: Table[AdapterReceipt] = field(default_factory=dict, metadata=ADDED)
