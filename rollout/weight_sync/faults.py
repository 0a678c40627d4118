"""Faults on purpose: a transport wrapper that breaks an update at a chosen phase and bucket.

    from rollout.weight_sync.faults import Fault, Faulty

    r.update_weights(model, transport=Faulty("inline", Fault("flip", bucket=3)))

The update must then fail with the named error, the old version must serve on bit for bit, and the
next good update must take. Use it on your own stack before you trust a week of training to it.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass

from torch import Tensor

from rollout.distributed import Rendezvous
from rollout.errors import ConfigError
from rollout.updates import BucketHeader, SharedBuckets, WeightChannel, WeightInfo
from rollout.weight_sync.transports import Sender, SenderFactory, make_sender

KINDS = ("flip", "drop", "delay", "kill")
PHASES = ("connect", "bucket", "close")


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and when.

    ``kind``: "flip" inverts bit ``bit`` of the payload after it was digested; "drop" loses the
    bucket; "delay" sleeps ``seconds``; "kill" sends SIGKILL to ``pid`` (None: the sender itself).
    ``phase``: "connect" (before meeting the ranks), "bucket" (as bucket ``bucket`` is sent) or
    "close" (all bytes sent, before the seal is judged).
    """

    kind: str
    phase: str = "bucket"
    bucket: int = 0
    bit: int = 0
    seconds: float = 0.0
    pid: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"unknown fault {self.kind!r}; known: {', '.join(KINDS)}")
        if self.phase not in PHASES:
            raise ConfigError(f"unknown phase {self.phase!r}; known: {', '.join(PHASES)}")
        if self.kind in ("flip", "drop") and self.phase != "bucket":
            raise ConfigError(f"a {self.kind} happens to a bucket, not at {self.phase}")


class Faulty:
    """A transport that behaves like ``transport`` but for the given faults."""

    def __init__(self, transport: str | SenderFactory, *faults: Fault) -> None:
        self._transport, self._faults = transport, faults

    def __call__(self, info: WeightInfo, timeout: float) -> Sender:
        return _FaultySender(make_sender(self._transport, info, timeout), self._faults)


class _FaultySender:
    """The wrapped sender; faults fire once each, as their bucket passes."""

    def __init__(self, inner: Sender, faults: tuple[Fault, ...]) -> None:
        self._inner, self._faults = inner, faults
        self.name = inner.name

    def buffers(self, bucket_bytes: int) -> tuple[Tensor, ...]:
        return self._inner.buffers(bucket_bytes)

    def rendezvous(self) -> Rendezvous | None:
        return self._inner.rendezvous()

    def shared(self) -> SharedBuckets | None:
        return self._inner.shared()

    def connect(self, channel: WeightChannel, timeout: float) -> None:
        self._fire("connect")
        self._inner.connect(channel, timeout)

    def send(self, channel: WeightChannel, header: BucketHeader, payload: Tensor) -> None:
        dropped = False
        for fault in self._faults:
            if fault.phase != "bucket" or fault.bucket != header.index:
                continue
            if fault.kind == "flip":
                payload = payload.clone()
                payload[fault.bit // 8] ^= 1 << fault.bit % 8
            elif fault.kind == "drop":
                dropped = True
            else:
                _strike(fault)
        if dropped:
            # A road that moves bytes apart from their announcement loses just the bytes.
            if self._inner.rendezvous() is not None:
                channel.bucket(header, None)
            return
        self._inner.send(channel, header, payload)

    def wait(self, channel: WeightChannel, index: int, timeout: float) -> None:
        self._inner.wait(channel, index, timeout)

    def close(self) -> None:
        self._fire("close")
        self._inner.close()

    def _fire(self, phase: str) -> None:
        for fault in self._faults:
            if fault.phase == phase:
                _strike(fault)


def _strike(fault: Fault) -> None:
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "kill":
        os.kill(os.getpid() if fault.pid is None else fault.pid, signal.SIGKILL)
