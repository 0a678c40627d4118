"""What the coordinator of a fleet and its members say to each other beside updates.

A member serves under a lease alone. A ``Grant`` names its end by the member's own clock, as it was
in the last ``Standing``: however late a grant arrives, it never lasts longer than the coordinator
counts, which starts when it has *received* that reading.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from msgspec import Meta

from rollout.wire.codec import ADDED, Count, Digest, Fence, Many, Seconds, Table, Text

MAX_AUTHORITIES = 1 << 20  # bytes; all those of a Linux distribution are a quarter of it

MAX_REPORT = 12 * 2048  # bytes of the digests in one report


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Serve until your clock says ``until``, in seconds; 0 is at once no more, None for good.

    ``fence``: the fencing epoch of who grants; a member refuses one below the highest that it has
    seen. ``serial`` grows from grant to grant of one fence: one that was overtaken changes nothing.
    ``epoch``: which life of the engine is meant. None changes nothing and asks where the member
    stands. ``returns``: the fleet has not begun; an engine that served alone before does so again
    once its clock says this. ``kv``: its standing is to say how full its KV cache is. ``fleet``:
    whose grant it is; a member that serves under another fleet's refuses it. ``removed``: it is the
    last one, as the fleet has let the member go.
    """

    fence: Fence
    serial: Count = 0
    epoch: Digest | None
    until: Seconds | None = 0.0
    returns: Seconds | None = field(default=None, metadata=ADDED)
    kv: bool = field(default=False, metadata=ADDED)
    fleet: Digest = field(default=0, metadata=ADDED)
    removed: bool = field(default=False, metadata=ADDED)


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
    fence: Fence
    timeout: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AskReport:
    """A front asks a member what others send there: what is new since ``since``, the serial of its
    last report of that ``life`` (its epoch).
    """

    life: Digest = 0
    since: Count = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How much a member has to do, for whichever front, and what it has had lately.

    ``epoch``: its life. ``fleet``: under whose lease it is; 0: nobody's. ``calls``: requests that
    it has. ``beginnings``: for each digest that calls came with, the newest last, its 8 bytes and
    how long ago that was, in seconds (float32, little-endian); ``serial``: of the last of them,
    below the newest where there are more than one report holds.
    """

    epoch: Digest
    fleet: Digest
    state: Text
    version: Count
    calls: Count
    running: Count
    waiting: Count
    kv_usage: Annotated[float, Meta(ge=0, le=1)]
    serial: Count = 0
    beginnings: Annotated[bytes, Meta(max_length=MAX_REPORT)] = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRoutes:
    """A front that routes only asks the coordinating one for its members.

    ``seen``: the serial of the last answer, 0 for none; as long as there is nothing newer, the
    answer may take ``wait`` seconds.
    """

    seen: Count = 0
    wait: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One member, as its coordinator knows it.

    ``address``, ``token``, ``tls_ca`` and ``tls_server_name``: how it is reached, as ``SendTo``'s.
    ``serves``: calls may go there. ``life``: the epoch of its engine, which it was heard of in.
    ``status`` and ``why``: for people. The others are its last ``Standing``'s.
    """

    name: Text
    address: Text
    token: Text = ""
    tls_ca: Annotated[str, Meta(max_length=MAX_AUTHORITIES)] = ""
    tls_server_name: Text = ""
    serves: bool
    life: Digest | None = None
    status: Text = ""
    why: Text = ""
    state: Text | None = None
    version: Count | None = None
    running: Count | None = None
    waiting: Count | None = None
    kv_usage: Annotated[float, Meta(ge=0, le=1)] = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Who is in a fleet, what is live there, and what its members are held in.

    ``serial`` grows with all that decides where a call may go. ``fleet``, ``fence``, ``epoch`` and
    ``version``: its coordinator's promise, ``adapters`` the versions in it. ``lease``: seconds of a
    grant. ``asleep``: the tags that were given up.
    """

    serial: Count
    fleet: Digest
    fence: Count
    epoch: Digest
    version: Count
    lease: Seconds
    paused: bool = False
    asleep: Many[Text] = ()
    adapters: Table[Count] = field(default_factory=dict)
    members: Many[Route] = ()
