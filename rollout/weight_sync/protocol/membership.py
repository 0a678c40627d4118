"""What the coordinator of a fleet and its members say to each other beside updates.

A member serves under a lease alone. A ``Grant`` names its end by the member's own clock, as it was
in the last ``Standing``: however late a grant arrives, it never lasts longer than the coordinator
counts, which starts when it has *received* that reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from rollout.wire.codec import ADDED, Count, Digest, Seconds, Text

MAX_AUTHORITIES = 1 << 20  # bytes; all those of a Linux distribution are a quarter of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Serve until your clock says ``until``, in seconds; 0 is at once no more, None for good.

    ``fence``: the fencing epoch of who grants; a member refuses one below the highest that it has
    seen. ``serial`` grows from grant to grant of one fence: one that was overtaken changes nothing.
    ``epoch``: which life of the engine is meant. None changes nothing and asks where the member
    stands. ``returns``: the fleet has not begun; an engine that served alone before does so again
    once its clock says this. ``kv``: its standing is to say how full its KV cache is. ``fleet``:
    whose grant it is; a member that serves under another fleet's refuses it.
    """

    fence: Count
    serial: Count = 0
    epoch: Digest | None
    until: Seconds | None = 0.0
    returns: Seconds | None = field(default=None, metadata=ADDED)
    kv: bool = field(default=False, metadata=ADDED)
    fleet: Digest = field(default=0, metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """Where a member stands: its life, its clock (seconds, never set), its weights and its load.

    ``kv_usage``: the share of its KV cache that requests hold, where the grant asked for it.
    """

    epoch: Digest
    clock: Seconds
    version: Count
    state: Text  # ``EngineStats.state``
    prepared: Text = ""  # the update that waits for a decision
    fence: Count = 0
    running: Count = 0
    waiting: Count = 0
    kv_usage: Annotated[float, Meta(ge=0, le=1)] = field(default=0.0, metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SendTo:
    """Bring the engine at ``address`` ("host:port") to what is live here, as ``version``.

    ``token``: the other's, "" for none. ``timeout`` bounds each wait, in seconds. ``tls_ca``: it
    speaks TLS, with a certificate of this authority (PEM), made out to ``tls_server_name`` where
    that is not "". Who sends shows its own server's certificate.
    """

    address: Text
    token: Text = ""
    version: Count
    timeout: Seconds
    tls_ca: Annotated[str, Meta(max_length=MAX_AUTHORITIES)] = field(default="", metadata=ADDED)
    tls_server_name: Text = field(default="", metadata=ADDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareRollback:
    """Be prepared to go back to what was live before the last commit, as ``version``.

    ``digest``: of all that is to be live then; a member that holds something else refuses. What
    becomes of it says a ``Decision`` of ``fence`` or a later epoch. ``timeout``: of each wait.
    """

    update_id: Text
    version: Count
    digest: Digest
    fence: Count
    timeout: Seconds
