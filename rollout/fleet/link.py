"""The way from a front to one member."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Self

from rollout.errors import ConfigError, EngineClosed, RolloutError
from rollout.rpc.address import split_address
from rollout.rpc.client import RolloutClient
from rollout.rpc.tls import ClientTls
from rollout.weight_sync.protocol.link import Forward
from rollout.weight_sync.protocol.membership import Grant, Report, SendTo, Standing
from rollout.weight_sync.protocol.messages import UpdateRequest, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt

LOOK_AGAIN = 30.0  # seconds until it is looked at once more why it does not answer


@dataclass(slots=True)
class Link:
    """One member as the front reaches it: ``client`` for calls and weights, ``control`` for what
    may not wait. ``calls``: of this front, under way there; ``others``: of other fronts, as the
    member reported last. ``http``: "host:port" of its HTTP server, "" where nobody has said;
    ``pid``: of its process, where this front has started it on its own host.
    """

    name: str
    client: RolloutClient
    control: RolloutClient
    token: str | None
    tls: ClientTls | None = None
    joins: bool = False  # by the update under way: it does not serve yet
    calls: int = 0
    others: int = 0
    http: str = ""
    pid: int | None = None
    report: Report | None = None  # its last one
    met: bool = False  # whether ``client`` knows what it can do
    verbs: set[asyncio.Future[None]] = field(default_factory=set)  # of its front's ``Hold``
    place: str = ""  # of the memory that its ranks can map: ``place_of``
    relays: bool = False  # whether it takes bytes on to other hosts
    unreached: dict[str, float] = field(default_factory=dict)  # by member: until when
    host: str = ""
    devices: tuple[str, ...] = ()  # its ranks' GPUs, if those can map others of their host:
    reaches: frozenset[str] = frozenset()  # which; ``cards_of``
    _life: int = 0  # its epoch, as it was last announced
    _maps_no_card: int | None = None  # the life in which it could not, whatever it announces
    _maps_no_memory: int | None = None  # the same of its host's
    held: object = None  # the life of the engine and what it is held in; None where unknown
    uncleared: bool = False  # its prefix cache was to be reset, and it has missed that
    # By update: what it answered to the commit, and when.
    receipts: dict[str, Future[tuple[float, UpdateReceipt]]] = field(default_factory=dict)
    _features: tuple[str, ...] = ()
    _looked: float = float("-inf")
    _problem: str = ""

    @classmethod
    def to(
        cls, address: str, token: str | None, name: str, lease: float, tls: ClientTls | None
    ) -> Self:
        """Lazy: nothing is sent yet. ``ConfigError`` where ``address`` is not host:port, or a file
        of ``tls`` cannot be read.
        """
        split_address(address)
        soon = max(lease / 2, 0.5)
        return cls(
            name,
            RolloutClient(address, token, tls=tls, keeps_epoch=False),  # the fleet judges epochs
            RolloutClient(address, token, timeout=soon, tls=tls, keeps_epoch=False),
            token, tls,
        )  # fmt: skip

    @property
    def where(self) -> dict[str, str | int | None]:
        """For people."""
        return {"address": self.client.address, "http": self.http or None, "pid": self.pid}

    def sending(self, version: int, timeout: float) -> SendTo:
        """What another member is told that is to bring this one to its ``version``."""
        tls = self.tls
        return SendTo(
            address=self.client.address, token=self.token or "", version=version, timeout=timeout,
            tls_ca="" if tls is None else tls.ca_text,
            tls_server_name="" if tls is None else tls.server_name or "",
        )  # fmt: skip

    def forwarding(self, request: UpdateRequest, secret: str) -> Forward:
        """What another member is told that is to bring this one an update's bytes."""
        way = self.sending(0, request.timeout)
        return Forward(
            address=way.address, token=way.token, tls_ca=way.tls_ca, timeout=way.timeout,
            tls_server_name=way.tls_server_name, update_id=request.update_id, secret=secret,
        )  # fmt: skip

    def ask(self, grant: Grant) -> Standing:
        """Where it stands. Raises what its answer was, or why there is none; ``ConfigError`` where
        it listens, but not to us: with TLS or without, or to HTTP.
        """
        try:
            self._features = self._features or self.control.info().features
            if not self.knows("returns"):  # of an earlier version: it refuses the field
                grant = replace(grant, returns=None)
            if not self.knows("fleets"):
                grant = replace(grant, fleet=0)
            if "kv" in self.client.features:  # it has been called
                grant = replace(grant, kv=True)
            standing = self.control.serve(grant)
        except EngineClosed as error:
            if time.monotonic() - self._looked > LOOK_AGAIN:
                # Its words are those of clients; a front has flags of their own for its engines.
                self._problem = (self.control.problem() or "").replace("--tls-", "--engine-tls-")
                self._looked = time.monotonic()
            if not self._problem:
                raise
            raise ConfigError(f"cannot talk to {self.client.address}: {self._problem}") from error
        self._looked = float("-inf")
        return standing

    def knows(self, feature: str) -> bool:
        """Whether it is of a version that has it; see ``wire.version``."""
        return feature in self._features

    def announced(self, info: WeightInfo) -> None:
        """By which ways bytes can reach it."""
        self.place = place_of(info) if info.epoch != self._maps_no_memory else ""
        self.relays = "relays" in info.features
        self.host, self._life = info.host, info.epoch
        self.reaches = cards_of(info) if info.epoch != self._maps_no_card else frozenset()
        self.devices = info.devices if self.reaches else ()

    def reaches_on(self, host: str) -> frozenset[str]:
        """The GPUs of ``host`` whose memory its ranks can map."""
        return self.reaches if host == self.host else frozenset()

    def maps_no_card(self) -> None:
        """It has tried in vain: from now on it is sent bytes, as long as it lives."""
        self._maps_no_card, self.devices, self.reaches = self._life, (), frozenset()

    def maps_no_memory(self) -> None:
        """As ``maps_no_card``: two machines may announce one host, as copies of a snapshot do."""
        self._maps_no_memory, self.place = self._life, ""

    def close(self) -> None:
        self.client.close()
        self.control.close()


def let_go(link: Link, grant: Grant) -> RolloutError | None:
    """Tell a member that the fleet forgets; the error where it did not hear of it."""
    try:
        link.control.serve(replace(grant, removed=link.knows("removals")))
    except RolloutError as error:
        return error
    finally:
        link.close()
    return None


def place_of(info: WeightInfo) -> str:
    """Names the memory that a member's ranks can map; "" where they share none."""
    can = info.device == "cpu" and "ipc" in info.transports and "shares" in info.features
    return info.host if can else ""


def cards_of(info: WeightInfo) -> frozenset[str]:
    """UUIDs of the GPUs of its host whose memory a member's ranks can map beside other members'."""
    can = "ipc" in info.transports and {"cards", "regions"} <= set(info.features)
    return frozenset(info.reaches if can and info.host and all(info.devices) else ())
