"""Several streams of one update: each carries one trainer rank's buckets."""

from __future__ import annotations

import threading
from dataclasses import replace

from torch import Tensor

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.link import StreamOffer
from rollout.weight_sync.protocol.messages import Begun, BucketHeader, Seal, UpdateRequest
from rollout.weight_sync.protocol.receipts import UpdateReceipt

_UNKNOWN = -1  # no bucket has this index


class Lanes:
    """Gives the buckets of all streams one order, that of their arrival. Thread-safe."""

    def __init__(self, channel: WeightChannel, request: UpdateRequest) -> None:
        self.channel, self._request, self._stream = channel, request, StreamOffer.of(request)
        self.bucket_bytes = request.bucket_bytes
        self._lock = threading.Lock()
        self._next = 0
        self._free = set(range(1, self._stream.senders))
        self.first = _First(self, request.update_id, self._stream.grace, 0)

    def open(self, number: int) -> Lane:
        """The channel of one more stream; each number once, else ``TransferFailed``."""
        with self._lock:
            if number not in self._free:
                raise TransferFailed(
                    f"lane {number} of update {self._request.update_id} is taken, or is none of "
                    f"its {self._stream.senders}"
                )
            self._free.discard(number)
        name = f"{self._request.update_id}/{number}"
        return Lane(self, name, self._stream.grace, number)

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> int:
        """Announce a bucket as the next one of all; returns its index."""
        with self._lock:  # ranks see buckets in the order of their indices
            index = self._next
            self.channel.bucket(replace(header, index=index), payload)
            self._next += 1
        return index


class Lane:
    """One stream's ``WeightChannel``: buckets, waits for them, and a seal that says "all sent"."""

    reads_in_place = False
    secret = ""  # its stream has one

    def __init__(self, lanes: Lanes, name: str, grace: float, number: int) -> None:
        self._lanes, self._number = lanes, number
        self.name, self.grace = name, grace
        self.bucket_bytes = lanes.bucket_bytes
        self._indices: dict[int, int] = {}  # this stream's number of a bucket -> its index
        self._sealed = False

    def buffer(self, nbytes: int) -> Tensor | None:
        return self._lanes.channel.buffer(nbytes)

    def begin(self, request: UpdateRequest) -> Begun:
        raise TransferFailed("a stream that joined an update begins none")

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        self._indices[header.index] = self._lanes.bucket(header, payload)

    def wait(self, index: int, timeout: float) -> None:
        self._lanes.channel.wait(self._indices.pop(index, _UNKNOWN), timeout)

    def seal(self, seal: Seal) -> None:
        self._sealed = True

    def commit(self) -> UpdateReceipt:
        raise TransferFailed("a stream that joined an update does not commit it")

    def abort(self, reason: str) -> None:
        if not self._sealed:
            self._sealed = True
            self._lanes.channel.abort(f"the stream of trainer rank {self._number}: {reason}")

    def close(self) -> None:
        self.abort("it ended before everything was sent")


class _First(Lane):
    """The stream that began the update, which carries buckets, too."""

    def seal(self, seal: Seal) -> None:
        self._lanes.channel.seal(seal)

    def commit(self) -> UpdateReceipt:
        return self._lanes.channel.commit()

    def abort(self, reason: str) -> None:
        self._lanes.channel.abort(reason)

    def close(self) -> None:
        self._lanes.channel.close()
