"""Faults on purpose: wrappers that break an update at a chosen phase and bucket.

    from rollout.weight_sync.faults import Fault, Faulty

    r.update_weights(model, transport=Faulty("inline", Fault("flip", bucket=0)))

The update must then fail with the named error, the old version must serve on bit for bit, and the
next good update must take. Use it on your own stack before you trust a week of training to it.

A transport sees the phases gather (a tensor as it has come from the source), connect and bucket,
and the end of the bytes ("seal", just before it is sent); what travels on the channel itself, the
seal and the commit, it does not see. ``FaultyLink`` wraps the way to the engine instead, and
reaches those two.

A fault that has not happened when all bytes are sent is a ``ConfigError``, and the update is given
up: a test that breaks nothing proves nothing.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from rollout.errors import ConfigError, TransferFailed
from rollout.testing.damage import ends_alike, flipped, misdescribed, swapped
from rollout.testing.pressure import exhaust_memory, fill_disk
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import (
    Begun,
    BucketHeader,
    Seal,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.transports import asked, ways
from rollout.weight_sync.transports.base import Holding, Opening, Sender, Transport

PHASES = ("gather", "connect", "bucket", "seal", "commit")
_BYTES = ("flip", "drop", "duplicate", "reorder", "truncate", "dtype", "shape")  # of a bucket
_ANYWHERE = ("delay", "stall", "kill", "cut", "fill", "exhaust")
_GATHERED = ("swap",)  # of a tensor as it was gathered
KINDS = (*_GATHERED, *_BYTES, *_ANYWHERE)
_ON_CHANNEL: Mapping[str, tuple[str, ...]] = {
    "seal": ("flip", "drop", "duplicate"),
    "commit": ("drop", "duplicate"),
}
_PAST = 0.5  # seconds beyond the update's timeout that a stalled sender sleeps


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when: at ``phase``, for "bucket" as bucket ``bucket`` is sent.

    Of a gather: "swap" exchanges the first and the last element of tensor number ``bucket``, as
    if its shards had been put together in the wrong order; it is found where each trainer rank
    digests its own boxes, as the receipt says.

    Of a bucket: "flip" inverts bit ``bit`` of its tensors' bytes after they were digested; "drop"
    loses it; "duplicate" sends it twice; "reorder" sends it after its successor (the last one has
    none, and goes as it is); "truncate" loses the second half of its bytes; "dtype" and "shape"
    announce its first tensor as something else.

    At any phase: "delay" sleeps ``seconds`` and goes on; "stall" stops the process ``pid``
    (SIGSTOP) for ``seconds`` while the sender goes on, or without a ``pid`` lets the sender itself
    sleep past the update's timeout; "kill" sends SIGKILL to ``pid`` (None: the sender itself);
    "cut" ends the control connection; "fill" leaves ``spare`` bytes of the file system of ``path``
    free for ``seconds``, "exhaust" as many of address space to process ``pid`` (pressure.py).

    On the channel (``FaultyLink``): "flip" at the seal inverts bit ``bit`` of one digest, "drop"
    loses the seal, or the reply of the commit; "duplicate" sends either twice.
    """

    kind: str
    phase: str = "bucket"
    bucket: int = 0
    bit: int = 0
    seconds: float = 0.0
    pid: int | None = None
    path: str | None = None
    spare: int = 0

    @property
    def name(self) -> str:
        at = f" {self.bucket}" if self.phase in ("bucket", "gather") else ""
        return f"the {self.kind} at {self.phase}{at}"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown fault {self.kind!r}; known: {', '.join(KINDS)}")
        if self.phase not in PHASES:
            raise ConfigError(f"unknown phase {self.phase!r}; known: {', '.join(PHASES)}")
        if self.phase == "gather" or self.kind in _GATHERED:
            fits = self.phase == "gather" and self.kind in (*_GATHERED, "delay", "stall")
        else:
            fits = (
                self.kind in _ANYWHERE
                or self.phase == "bucket"
                or self.kind in _ON_CHANNEL.get(self.phase, ())
            )
        if not fits:
            raise ConfigError(f"a {self.kind} does not happen at {self.phase}")
        needed = {"fill": self.path, "exhaust": self.pid}
        if self.kind in needed and (needed[self.kind] is None or self.seconds <= 0):
            raise ConfigError("a fill needs its path, an exhaust its pid, and both their seconds")


class Faulty(Transport):
    """A transport that behaves like ``transport`` but for the given faults."""

    name: ClassVar[str] = "faulty"

    def __init__(self, transport: str | Transport, *faults: Fault) -> None:
        for fault in faults:
            of_channel = fault.phase in _ON_CHANNEL and fault.kind not in _ANYWHERE
            if of_channel or fault.phase == "commit":
                raise ConfigError(
                    f"a transport does not see a {fault.kind} at {fault.phase}: use FaultyLink"
                )
        self._transport, self._faults = transport, faults

    def on(self, info: WeightInfo) -> Transport:
        inner = asked(self._transport, info) or ways("auto", info)[0].transport
        return _FaultyTransport(inner, self._faults)

    def check_sent(self, sender: Sender) -> None:
        """All bytes are sent by ``sender``: ``ConfigError`` for faults that did not happen."""
        if not isinstance(sender, _FaultySender):
            names = ", ".join(fault.name for fault in self._faults)
            raise ConfigError(
                f"{names} never happened: the update took another transport instead. It was given "
                "up"
            )
        sender.check_fired()


class FaultyLink:
    """A way to an engine with faults at the seal and the commit.

    ``publish(model, connect=lambda: FaultyLink(RolloutClient(address), fault), options=...)``
    """

    def __init__(self, link: WeightLink, *faults: Fault) -> None:
        for fault in faults:
            if fault.phase not in _ON_CHANNEL:
                raise ConfigError(f"a link does not see the {fault.phase}: use Faulty")
        self._link, self._faults = link, faults

    joins = False

    @property
    def local_address(self) -> str:
        return self._link.local_address

    def info(self) -> WeightInfo:
        return self._link.info()

    def receipts(self) -> tuple[UpdateReceipt, ...]:
        return self._link.receipts()

    def open(self) -> WeightChannel:
        return _FaultyChannel(self._link.open(), self._faults)

    def join(self, request: UpdateRequest, secret: str, lane: int) -> WeightChannel:
        raise TransferFailed("faults are of the first stream")


class _FaultyTransport(Transport):
    """The facts of ``inner``, whose sender is wrapped."""

    def __init__(self, inner: Transport, faults: tuple[Fault, ...]) -> None:
        self._inner, self._faults = inner, faults
        self.name, self.senders = inner.name, inner.senders  # type: ignore[misc]
        gathers = any(fault.phase == "gather" for fault in faults)
        self.shared = inner.shared and not gathers  # type: ignore[misc]

    @property
    def streams(self) -> bool:
        return self._inner.streams

    def why_not(self, info: WeightInfo, holding: Holding | None) -> str | None:
        return self._inner.why_not(info, holding)

    def open(self, opening: Opening) -> Sender:
        return _FaultySender(self._inner.open(opening), self._faults, opening.timeout)


class _FaultySender(Sender):
    """The wrapped sender; faults fire once each, as their bucket passes."""

    def __init__(self, inner: Sender, faults: tuple[Fault, ...], timeout: float) -> None:
        self._inner, self._faults, self._timeout = inner, faults, timeout
        self._channel: WeightChannel | None = None
        self._late: tuple[BucketHeader, Tensor] | None = None  # sent after its successor
        self._closed = False
        self._fired: set[Fault] = set()
        self._buckets = self._tensors = 0  # that have passed
        self.offer, self.buffers = inner.offer, inner.buffers
        self.device, self.bytes_go = inner.device, inner.bytes_go

    def accepted(self, begun: Begun) -> None:
        self._inner.accepted(begun)

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        self._channel = channel
        self._fire("connect")
        self._inner.connect(channel, timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        late, self._late = self._late, None
        self._send(channel, header, payload)
        if late is not None:
            self._inner.send(channel, *late)

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        late, self._late = self._late, None
        if late is not None and late[0].index != index:
            self._late, late = late, None
        if late is not None:  # it has no successor
            self._fired -= {f for f in self._faults if f.kind == "reorder" and f.bucket == index}
            self._inner.send(channel, *late)
        self._inner.wait(channel, index, timeout)
        self.sent_bytes = self._inner.sent_bytes

    def gathered(self, tensor: Tensor) -> Tensor:
        """A tensor of the source, before it is packed."""
        number, self._tensors = self._tensors, self._tensors + 1
        for fault in self._faults:
            if fault.phase == "gather" and fault.bucket == number and self._channel is not None:
                if fault.kind == "swap" and ends_alike(tensor):
                    continue
                self._fired.add(fault)
                if fault.kind == "swap":
                    tensor = swapped(tensor)
                else:
                    _strike(fault, self._channel, self._timeout)
        return tensor

    def close(self) -> None:
        if not self._closed:  # the first time all bytes are sent; later it is the end
            self._closed = True
            self._fire("seal")
        self.buffers = ()
        self._inner.close()

    def check_fired(self) -> None:
        """All bytes are sent: raise ``ConfigError`` for the faults that did not happen."""
        idle = [fault for fault in self._faults if fault not in self._fired]
        if idle:
            raise ConfigError(
                f"{', '.join(f.name for f in idle)} never happened: the update had buckets 0 to "
                f"{self._buckets - 1}"
                + (f" and tensors 0 to {self._tensors - 1}" if self._tensors else "")
                + "; name one of them, or pass smaller bucket_bytes. The update was given up"
            )

    def _send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        lost = twice = False
        self._buckets = max(self._buckets, header.index + 1)
        for fault in self._faults:
            if fault.phase != "bucket" or fault.bucket != header.index:
                continue
            self._fired.add(fault)
            if fault.kind == "flip":
                payload = flipped(header, payload, fault.bit)
            elif fault.kind == "truncate":
                payload = self._truncated(payload)
            elif fault.kind in ("dtype", "shape"):
                header = misdescribed(header, fault.kind)
            elif fault.kind == "reorder":
                self._late = (header, payload)
                return
            elif fault.kind == "stall" and fault.pid is None and self.bytes_go == "group":
                channel.bucket(header, None)  # announced, and then nothing comes
                _strike(fault, channel, self._timeout)
                return
            else:
                _strike(fault, channel, self._timeout)
            lost |= fault.kind == "drop"
            twice |= fault.kind == "duplicate"
        if not lost:
            self._inner.send(channel, header, payload)
            if twice:
                self._inner.send(channel, header, payload)
        elif self.bytes_go == "group":
            # Where bytes move apart from their announcement, just the bytes are lost.
            channel.bucket(header, None)

    def _truncated(self, payload: Tensor) -> Tensor:
        keep = payload.numel() // 2
        if self.bytes_go != "memory":
            return payload[:keep]
        payload[keep:] = 0  # shared memory has a fixed length: the rest was never written
        return payload

    def _fire(self, phase: str) -> None:
        for fault in self._faults:
            if fault.phase == phase and self._channel is not None:
                self._fired.add(fault)
                _strike(fault, self._channel, self._timeout)


class _FaultyChannel:
    """The wrapped channel."""

    reads_in_place = False  # what is sent is altered: never the source's own memory

    def __init__(self, inner: WeightChannel, faults: tuple[Fault, ...]) -> None:
        self._inner, self._faults = inner, faults
        self._timeout = 0.0

    @property
    def secret(self) -> str:
        return self._inner.secret

    def begin(self, request: UpdateRequest) -> Begun:
        self._timeout = request.timeout
        return self._inner.begin(request)

    def buffer(self, nbytes: int) -> Tensor | None:
        return self._inner.buffer(nbytes)

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        self._inner.bucket(header, payload)

    def wait(self, index: int, timeout: float) -> None:
        self._inner.wait(index, timeout)

    def seal(self, seal: Seal) -> None:
        kinds = self._fire("seal")
        if fault := kinds.get("flip"):
            name = min(seal.digests)
            wrong = seal.digests[name] ^ 1 << fault.bit % 64
            seal = replace(seal, digests={**seal.digests, name: wrong})
        if "drop" not in kinds:
            self._inner.seal(seal)
        if "duplicate" in kinds:
            self._inner.seal(seal)

    def commit(self) -> UpdateReceipt:
        kinds = self._fire("commit")
        receipt = self._inner.commit()
        if "duplicate" in kinds:
            self._inner.commit()
        if "drop" in kinds:
            raise TransferFailed("the reply of the commit was lost on purpose")
        return receipt

    def abort(self, reason: str) -> None:
        self._inner.abort(reason)

    def close(self) -> None:
        self._inner.close()

    def _fire(self, phase: str) -> dict[str, Fault]:
        """Strike what strikes here; the faults of this phase, by kind."""
        here = {fault.kind: fault for fault in self._faults if fault.phase == phase}
        for fault in here.values():
            _strike(fault, self._inner, self._timeout)
        return here


def _strike(fault: Fault, channel: WeightChannel, timeout: float) -> None:
    """The kinds that do not care what is being sent."""
    pid = os.getpid() if fault.pid is None else fault.pid
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "kill":
        os.kill(pid, signal.SIGKILL)
    elif fault.kind == "cut":
        channel.close()
    elif fault.kind == "stall" and fault.pid is None:
        time.sleep(timeout + _PAST)
    elif fault.kind == "stall":
        os.kill(pid, signal.SIGSTOP)
        _later(fault.seconds, lambda: _go_on(pid))
    elif fault.kind == "fill":
        assert fault.path is not None
        _later(fault.seconds, fill_disk(fault.path, fault.spare))
    elif fault.kind == "exhaust":
        _later(fault.seconds, exhaust_memory(pid, fault.spare))


def _later(seconds: float, run: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, run)
    timer.daemon = True
    timer.start()


def _go_on(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGCONT)
    except ProcessLookupError:
        return  # it was killed meanwhile
