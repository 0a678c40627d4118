"""What a transport is: how the bytes of a bucket get from the sender to every rank.

One row of the registry and one file with a subclass of ``Transport``, its ``Sender`` and its
receiver; everybody else reads the facts below and never compares a name. A transport never knows a
model. The sender announces a bucket on the channel, which reaches all ranks in one order, then
moves its bytes; a rank posts its receive when it sees the announcement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from rollout.distributed import LOOPBACK
from rollout.errors import ConfigError, TransferFailed
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.in_place import Given, InPlaceHeaders
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    UpdateRequest,
    WeightInfo,
)
from rollout.wire.codec import from_plain

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What the trainer's end is opened for.

    ``bucket_bytes``: the longest bucket. ``host``: the address of this machine as the engine
    reaches it, for transports that listen here. ``senders``: how many trainer ranks will send.
    ``known``: digest of the engine's requested boxes that the sender remembers. ``staying``: all
    tensors of the update, where none of them has to be gathered, compared or kept; else none.
    ``headers``: of what was read where it lies in earlier updates. ``mapped``: the ranks are to
    read every trainer rank's tensors where they lie.
    """

    info: WeightInfo
    timeout: float
    bucket_bytes: int
    host: str = LOOPBACK
    senders: int = 1
    known: str = ""
    staying: Callable[[], Sequence[Tensor]] = tuple
    headers: InPlaceHeaders = field(default_factory=InPlaceHeaders)
    mapped: bool = False


@dataclass(frozen=True, slots=True)
class EngineRank:
    """The rank that receives; ``member``: its place now in a framework's group, if it has one."""

    rank: int
    device: str
    member: Callable[[], Any] = lambda: None


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """What an offer means for the engine.

    ``senders``: trainer ranks that send. ``known``: the digest of requested boxes that they
    remember. ``bounded``: whether buckets are no longer than ``bucket_bytes``. ``on_channel``:
    whether they bring their bytes, so that an update can be sent again over any channel.
    """

    senders: int = 1
    known: str = ""
    bounded: bool = True
    on_channel: bool = False


class Holding(Protocol):
    """What trainer ranks hold of the weights."""

    @property
    def problem(self) -> str | None:
        """Why ranks cannot send their own boxes, or None."""
        ...

    @property
    def split(self) -> bool:
        """Whether no rank holds everything, so that a gather would be needed."""
        ...

    @property
    def not_mapped(self) -> str | None:
        """Why the engine's ranks cannot read every rank's tensors where they lie ("": that was not
        looked into); None where they can.
        """
        ...

    @property
    def hosts(self) -> Sequence[str]:
        """Where each rank runs."""
        ...

    @property
    def rank_gpus(self) -> Sequence[str]:
        """Of each rank, the UUID of its current GPU; "" where it has none."""
        ...

    @property
    def not_exchanged(self) -> str:
        """Why ranks cannot bring each other their boxes between GPUs; "" where they can."""
        ...


class Sender:
    """The trainer's end during one update; used by one thread, closed by whoever opened it.

    ``offer``: what the request carries so that the ranks find this sender, JSON-able. ``buffers``:
    equal uint8 buffers that buckets have to be packed into, () leaves it to the packer, which
    makes them on ``device``. ``bytes_go``: on the channel, through memory that the ranks map, or
    over a group of trainer and ranks.
    """

    offer: Mapping[str, Any] = MappingProxyType({})
    buffers: tuple[Tensor, ...] = ()
    device: str = "cpu"
    bytes_go: Literal["channel", "memory", "group"] = "group"
    sent_bytes: int = 0  # by this rank so far, where every trainer rank sends

    def accepted(self, begun: Begun) -> None:
        """What the engine has answered to the offer; called once, before ``connect``."""

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        """Meet the engine's ranks; called once, after the engine has accepted the update."""

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        """Announce a bucket and start moving it; ``payload`` stays untouched until ``wait``."""
        raise NotImplementedError

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        """Until every rank has taken bucket ``index``, so that its buffer is free again."""
        channel.wait(index, timeout)

    def gathered(self, tensor: Tensor) -> Tensor:
        """What the source has yielded, as it is to be packed."""
        return tensor

    def why_packed(self, channel: WeightChannel, tensor: Tensor) -> str | None:
        """Why a tensor that stays where it is has to be packed; None where ranks read it there."""
        return "it is not read in place"

    def in_place(
        self, channel: WeightChannel, header: BucketHeader, regions: Sequence[Tensor]
    ) -> None:
        """Announce a bucket of what ``why_packed`` allows; all of it stays until ``wait``."""
        raise NotImplementedError

    def give(self, tensors: Sequence[Tensor]) -> Given:
        """Where tensors lie that are lent, for ``given``."""
        raise NotImplementedError

    def given(self, channel: WeightChannel, header: BucketHeader, given: Sequence[Given]) -> None:
        """Announce a bucket of what is lent, each entry of it where ``given`` says, one trainer
        rank's after another's; all of it stays until ``wait``.
        """
        raise NotImplementedError

    def lend(self, gpus: Iterable[str]) -> Mapping[str, Any] | None:
        """What the trainer's other ranks have to know (JSON-able) so that all their tensors, on
        these GPUs, are read where they lie; None where they are not. Once the engine has accepted.
        """
        return None

    def close(self) -> None:
        """Let go at once; peers blocked on it see an error. Idempotent."""


class Receiver(Protocol):
    """A rank's end during one update; used by the rank's staging thread only."""

    def connect(self, timeout: float) -> None: ...

    def receive(self, header: BucketHeader, carried: Tensor | None, timeout: float) -> Tensor:
        """The payload of the announced bucket, uint8 [nbytes], valid until the next call."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class InPlaceReceiver(Receiver, Protocol):
    """A rank's end that also knows the sender's memory."""

    def regions(self, header: BucketHeader, carried: Mapping[str, Tensor]) -> Sequence[Tensor]:
        """The regions, flat uint8, that the entries of a bucket lie in; valid until the next call.

        ``carried``: the tensors that came with the announcement.
        """
        ...


class Transport:
    """The facts of a transport, and its two ends. Without state: one instance serves everybody."""

    name: ClassVar[str]
    senders: ClassVar[Literal["one", "all"]] = "one"  # trainer ranks; "all" send their own boxes
    shared: ClassVar[bool] = False  # its buffers may be written to by trainer ranks together
    exchanged: ClassVar[bool] = False  # trainer ranks bring boxes to those that the engine maps
    maps: ClassVar[bool] = False  # it leads to tensors of all trainer ranks, where they lie
    in_process: ClassVar[bool] = False  # nothing is nearer to an engine in this process
    offered: ClassVar[bool] = True  # by every engine
    served_as: ClassVar[str] = ""  # its name at a service, where it is another
    fallback: ClassVar[bool] = False  # "auto" takes it, in the engine's order, after the preferred

    @property
    def streams(self) -> bool:
        """Whether each trainer rank may bring a stream of its own to the one channel."""
        return False

    def on(self, info: WeightInfo) -> Transport:
        """This transport to the engine of ``info``."""
        return self

    def preference(self, info: WeightInfo, holding: Holding | None) -> str | None:
        """Why "auto" tries it before the engine's own order; None where it does not."""
        return None

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        """Why it cannot be used between this trainer and this engine, or None.

        ``holding`` is None where it was not looked into.
        """
        return None

    def open(self, opening: Opening) -> Sender:
        """The trainer's end; ``ConfigError`` or ``TransferFailed`` where there can be none."""
        raise NotImplementedError

    def check(self, request: UpdateRequest, num_ranks: int, device: str) -> Accepted:
        """On the engine's side, before anything is staged: ``ConfigError`` for a bad offer."""
        raise NotImplementedError

    def receiver(self, request: UpdateRequest, at: EngineRank) -> Receiver:
        """The rank's end for a request that was checked."""
        raise NotImplementedError

    def check_sent(self, sender: Sender) -> None:
        """All bytes are sent, by ``sender``, which may be another transport's after a failure."""


def offer_of(kind: type[T], request: UpdateRequest) -> T:
    """The offer of a request, as its transport declares it; ``ConfigError`` for any other."""
    try:
        return from_plain(kind, dict(request.offer))
    except TransferFailed as error:
        raise ConfigError(f"transport {request.transport!r} refuses its offer: {error}") from error
