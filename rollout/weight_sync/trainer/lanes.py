"""One stream per trainer rank to the engine's port: each sends its own part of an update."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

from rollout.errors import DeadlineExceeded, RolloutError, TransferFailed
from rollout.weight_sync.protocol.bucket import BucketPacker
from rollout.weight_sync.protocol.codec import request_from_wire
from rollout.weight_sync.protocol.delta import CodedDelta
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import Seal, WeightChannel
from rollout.weights import TensorPiece


class Outlet(Protocol):
    """Where a rank's parts go; an error is kept in ``failure`` for the next vote."""

    failure: RolloutError | None

    def add_part(self, name: str, part: CodedDelta | TensorPiece) -> None: ...

    def flush(self) -> None:
        """Until everything that was added has been taken by every engine rank."""
        ...

    def sent(self) -> list[int]:
        """Buckets, bytes and elements."""
        ...


class RankStream:
    """The stream of a rank that did not begin the update."""

    def __init__(self, link: WeightLink, told: Any, rank: int) -> None:
        request = request_from_wire(told["request"])
        self._timeout = request.timeout
        self._channel: WeightChannel = link.join(request, told["secret"], rank)
        self._packer = BucketPacker(request.bucket_bytes, wait_free=self._wait)
        self._buckets = self._bytes = self._elements = 0
        self._gave_up: str | None = None
        self.failure: RolloutError | None = None
        self.seconds = 0.0  # in the transfer

    def add_part(self, name: str, part: CodedDelta | TensorPiece) -> None:
        self._attempt(lambda: self._send(self._packer.add_part(name, part)))

    def flush(self) -> None:
        """The last buckets; then all of them have been taken, and this stream is done."""
        self._attempt(lambda: self._send(self._packer.flush()))
        self._attempt(self._finish)

    def sent(self) -> list[int]:
        return [self._buckets, self._bytes, self._elements]

    def give_up(self, reason: str) -> None:
        """From another thread."""
        self._gave_up = reason
        self._channel.abort(reason)

    def close(self) -> None:
        self._channel.close()

    def _attempt(self, act: Callable[[], None]) -> None:
        if self.failure is not None:
            return
        try:
            if self._gave_up is not None:
                raise DeadlineExceeded(self._gave_up)
            act()
        except RolloutError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001 - it must wait for the next vote, whatever it is
            self.failure = TransferFailed(f"sending failed: {error}")
            self.failure.__cause__ = error

    def _send(self, made: Any) -> None:
        for header, payload in made:
            started = time.perf_counter()
            self._channel.bucket(header, payload)
            self._buckets = header.index + 1
            self._bytes += header.nbytes
            self._elements += sum(e.count if e.sparse else e.box.numel for e in header.entries)
            self.seconds += time.perf_counter() - started

    def _finish(self) -> None:
        for index in range(max(0, self._buckets - 2), self._buckets):
            self._wait(index)
        self._channel.seal(Seal(num_buckets=self._buckets, digests={}))

    def _wait(self, index: int) -> None:
        self._channel.wait(index, self._timeout)
