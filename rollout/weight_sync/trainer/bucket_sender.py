"""What the sender's buckets carry: packed on one thread, digested and sent beside it, counted."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from rollout.distributed.native_thread import NativeThread
from rollout.errors import DeadlineExceeded, RolloutError, TransferFailed
from rollout.kernels import digest
from rollout.weight_sync.protocol.bucket import BucketPacker
from rollout.weight_sync.protocol.delta import CodedDelta
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.messages import BucketHeader, WeightChannel
from rollout.weight_sync.trainer.encoder import Encoder
from rollout.weight_sync.transports.base import Sender
from rollout.weights import Box, Shape, TensorMeta, TensorPiece

MIN_LENT = 4 << 20  # bytes; shorter tensors are copied together into one bucket

Packed = Iterator[tuple[BucketHeader, Tensor]]


@dataclass(slots=True)
class Books:
    """Counts and seconds of one trainer rank; what the seal and the receipt say is from here."""

    digests: dict[str, int] = field(default_factory=dict)
    num_bytes: int = 0  # of the tensors
    wire_bytes: int = 0
    num_buckets: int = 0
    changed: int = 0  # elements sent
    sent: list[int] = field(default_factory=list)  # bytes by trainer rank, where each sends
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    digest_seconds: float = 0.0
    of_own_boxes: bool = False  # digests are of what each rank holds, not of what was gathered

    def digest(self, name: str, values: Tensor, shape: Shape, box: Box) -> int:
        """Add the digest of a box to its tensor's, and return it."""
        started = time.perf_counter()
        found = digest(values, shape, box)
        self.digests[name] = total([self.digests.get(name, 0), found])
        self.digest_seconds += time.perf_counter() - started
        return found

    def digest_bucket(self, header: BucketHeader, payload: Tensor) -> None:
        """The digests of a bucket that holds whole tensors and boxes of them, no changes."""
        for entry in header.entries:
            values = payload[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
            self.digest(entry.name, values.view(entry.box.shape), entry.shape, entry.box)

    def end(
        self,
        metadata: Sequence[TensorMeta],
        digests: Mapping[str, int],
        sent: Sequence[int],
    ) -> None:
        """Everything has been sent: the digests of all ranks' parts, and (none where the first rank
        alone sent) the bytes that each of them has.
        """
        self.digests, self.of_own_boxes = dict(digests), True
        self.num_bytes = sum(meta.nbytes for meta in metadata)
        if sent:
            self.wire_bytes, self.sent = sum(sent), list(sent)


class Shipment:
    """The sender's buckets on their way; an error is kept in ``failure`` for the next vote.

    Digests are taken and buckets announced, sent and waited for on a thread beside the caller's,
    while the next bucket is gathered. Before ``pack`` it takes rounds alone, as they come.
    """

    def __init__(
        self, channel: WeightChannel, sender: Sender, encoder: Encoder, books: Books,
        *, dtype: torch.dtype, timeout: float, digests: bool = True,
    ) -> None:  # fmt: skip
        """``digests``: whether to take them here, of what is packed."""
        self._digests = digests
        self._channel, self._sender, self._encoder = channel, sender, encoder
        self._books, self._dtype, self._timeout = books, dtype, timeout
        self._packer: BucketPacker | None = None
        self._beside = Beside("update-sender")
        self._room = 0  # the address of the last room given
        self._by_bucket = False  # whether tensors are digested as they are sent
        self._gave_up: str | None = None
        self.failure: RolloutError | None = None

    def connect(self) -> None:
        """Meet the engine's ranks, and the other members of a group that trainer ranks form."""
        self._sender.connect(self._channel, self._timeout)

    def pack(self, bucket_bytes: int) -> None:
        """Take tensors from now on, into the sender's own buffers where it has some."""
        buffers = self._sender.buffers
        self._packer = BucketPacker(
            min([bucket_bytes, *(buffer.numel() for buffer in buffers)]),
            device=self._sender.device,
            wait_free=self._wait_free,
            buffers=buffers,
        )

    # ---- tensors, or parts of them ----

    def room(self, dtype: torch.dtype, shape: Shape) -> Tensor | None:
        """Where the next tensor may be gathered to."""
        if self.failure is not None or self._packer is None or self._encoder.encoding == "delta":
            return None  # of a delta the changes alone will be packed
        started = time.perf_counter()
        try:
            for header, payload in self._packer.begin(prod(shape) * dtype.itemsize):
                self._later(partial(self._ship, header, payload))
            room = self._packer.room(dtype, shape)
            self._room = 0 if room is None else room.data_ptr()
            return room
        except Exception as error:  # noqa: BLE001 - as in ``_attempt``
            self._fail(error, "a bucket")
            return None
        finally:
            self._books.gather_seconds -= time.perf_counter() - started  # it waits inside a gather

    def add(self, name: str, tensor: Tensor) -> None:
        """Pack one tensor and have full buckets sent."""
        self._attempt(name, lambda packer: self._packed(packer, name, tensor))

    def add_part(self, name: str, part: CodedDelta | TensorPiece) -> None:
        """Pack and send what a trainer rank has coded of its part."""
        self._attempt(name, lambda packer: packer.add_part(name, part))

    def flush(self) -> None:
        """Send what is left and wait until every rank has taken every bucket."""
        if self.failure is not None:
            return
        try:
            for header, payload in self._packer.flush() if self._packer is not None else ():
                self._later(partial(self._ship, header, payload))
            self._beside.wait()
            for index in range(max(0, self._books.num_buckets - 2), self._books.num_buckets):
                self._taken(index)
        except Exception as error:  # noqa: BLE001 - as in ``_attempt``
            self._fail(error, "the last buckets")

    def sent(self) -> list[int]:
        """Buckets, bytes and elements that this rank has sent so far."""
        return [self._books.num_buckets, self._books.wire_bytes, self._books.changed]

    # ---- rounds ----

    def send_round(self, header: BucketHeader, payload: Tensor) -> None:
        """Announce a round and send this rank's part of it; the round before has arrived then."""
        if self._gave_up is not None:
            raise DeadlineExceeded(self._gave_up)
        self._send(header, payload)
        if header.index:
            self._taken(header.index - 1)

    @property
    def sent_bytes(self) -> int:
        """What this rank alone has sent in rounds."""
        return self._sender.sent_bytes

    # ---- its end ----

    def give_up(self, reason: str) -> None:
        """From the watchdog's thread: free the engine's side; this side is in a collective."""
        self._gave_up = reason
        self._channel.abort(reason)

    def close(self) -> None:
        self._beside.close()
        self._packer = None  # its buffers go now, not when the cycle of callbacks is collected

    # ---- inside ----

    def _attempt(self, name: str, pack: Callable[[BucketPacker], Packed]) -> None:
        if self.failure is not None:
            return
        assert self._packer is not None
        try:
            if self._gave_up is not None:
                raise DeadlineExceeded(self._gave_up)
            self._beside.check()
            for header, payload in pack(self._packer):
                self._later(partial(self._ship, header, payload))
        except Exception as error:  # noqa: BLE001 - it must wait for the next vote, whatever it is
            self._fail(error, repr(name))

    def _fail(self, error: Exception, what: str) -> None:
        """Keep the error, as one of the tree, for the next vote."""
        if isinstance(error, RolloutError):
            self.failure = error
            return
        self.failure = TransferFailed(f"sending {what} failed: {error}")
        self.failure.__cause__ = error

    def _packed(self, packer: BucketPacker, name: str, tensor: Tensor) -> Packed:
        tensor = tensor.detach()
        if tensor.is_floating_point() and tensor.dtype != self._dtype:
            tensor = tensor.to(self._dtype)
        self._by_bucket = self._encoder.encoding == "full"
        if self._digests and not self._by_bucket:  # of the whole tensor, which may not travel
            shape = tuple(tensor.shape)
            self._books.digest(name, tensor, shape, Box.full(shape))
        self._books.num_bytes += tensor.nbytes
        delta = self._encoder.delta(name, tensor, packer.bucket_bytes)
        if delta is not None:
            return packer.add_delta(name, delta)
        return self._lent(packer, name, tensor) if self._lends(tensor) else packer.add(name, tensor)

    def _lends(self, tensor: Tensor) -> bool:
        """Whether the engine, in this process, is to read the tensor where it lies."""
        here = self._sender.bytes_go == "channel" and self._channel.reads_in_place
        dense = tensor.device.type == "cpu" and tensor.is_contiguous()
        if not (here and dense and self._by_bucket and tensor.nbytes >= MIN_LENT):
            return False
        return tensor.data_ptr() != self._room  # else it lies in its bucket already

    def _lent(self, packer: BucketPacker, name: str, tensor: Tensor) -> Packed:
        for header, payload in packer.lend(name, tensor):
            yield header, payload
            if header.index:  # at most two are under way, as with buffers
                self._wait_free(header.index - 1)
        self._wait_free(packer.num_buckets - 1)  # whoever yielded the tensor may write to it then

    def _later(self, task: Callable[[], None]) -> None:
        """Run ``task`` beside this thread, on the device's stream that this thread packs on."""
        assert self._packer is not None
        stream: AbstractContextManager[Any] = nullcontext()
        if self._packer.device.type == "cuda":
            stream = torch.cuda.stream(torch.cuda.current_stream())

        def run() -> None:
            with stream:
                task()

        self._beside.do(run)

    def _ship(self, header: BucketHeader, payload: Tensor) -> None:
        """Digest what a bucket holds of whole tensors, before others can reach it, and send it."""
        if self._digests and self._by_bucket:
            self._books.digest_bucket(header, payload)
        self._send(header, payload)

    def _send(self, header: BucketHeader, payload: Tensor) -> None:
        books, started = self._books, time.perf_counter()
        self._sender.send(self._channel, header, payload)
        books.num_buckets = header.index + 1
        books.changed += sum(e.count if e.sparse else e.box.numel for e in header.entries)
        books.wire_bytes += header.nbytes
        books.transfer_seconds += time.perf_counter() - started

    def _wait_free(self, index: int) -> None:
        """Until a bucket's buffer may be packed again."""
        self._later(partial(self._taken, index))
        self._beside.wait()

    def _taken(self, index: int) -> None:
        started = time.perf_counter()
        self._sender.wait(self._channel, index, self._timeout)
        self._books.transfer_seconds += time.perf_counter() - started


class Beside:
    """Runs tasks one after the other; after the first error none of them.

    ``do``, ``check`` and ``wait`` are for one thread, ``close`` for any. The tasks have deadlines
    of their own, so that ``wait`` ends. The thread starts with the first task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | threading.Event | None]
        self._tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def do(self, task: Callable[[], None]) -> None:
        """Have ``task`` run after those given before; raises what one of them has raised."""
        self.check()
        if self._thread is None:
            self._thread = NativeThread(self._name, self._run, self.close)
            self._thread.start()
        self._tasks.put(task)

    def check(self) -> None:
        """Raise what a task has raised, if one has."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Until all tasks given so far have run; raises what one of them has raised."""
        if self._thread is not None:
            done = threading.Event()
            self._tasks.put(done)
            done.wait()
        self.check()

    def close(self) -> None:
        """Begin no further task; one that is running is not waited for. The last call."""
        if self._error is None:
            self._error = TransferFailed("the update has ended")
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if isinstance(task, threading.Event):
                task.set()
            elif self._error is None:
                try:
                    task()
                except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                    self._error = error
