"""Buckets of pieces: packed on one thread, digested and sent on another, to wherever a rank can."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from rollout.distributed.native_thread import NativeThread, on_this_stream
from rollout.errors import DeadlineExceeded, RolloutError, TransferFailed
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.delta import CodedDelta
from rollout.weight_sync.protocol.in_place import Given, InPlaceHeaders
from rollout.weight_sync.protocol.messages import BucketHeader, Seal
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.trainer.transfer_stats import TransferStats, WireDtype
from rollout.weight_sync.transports.base import Sender
from rollout.weights import CASTABLE, Shape

IN_PLACE_BYTES = 2 << 30  # announced at once: the ranks copy while the next are digested
MIN_ZERO_COPY = 4 << 20  # bytes; shorter tensors are copied together into one bucket

Packed = Iterator[tuple[BucketHeader, Tensor]]


class BucketSink(Protocol):
    """Where a rank's pieces go; an error is kept in ``failure`` until the next vote."""

    @property
    def bucket_bytes(self) -> int: ...

    @property
    def failure(self) -> RolloutError | None: ...

    def add(self, name: str, part: Piece | CodedDelta) -> None: ...

    def exchange(self) -> None:
        """Called on every rank after a vote has passed."""
        ...

    def flush(self) -> None:
        """Wait until every engine rank has taken everything that was added."""
        ...

    def give_up(self, reason: str) -> None:
        """From the watchdog's thread: free the engine's side; this side is in a collective."""
        ...


class NoSink:
    """The sink of a rank that only takes part in the gathers."""

    bucket_bytes, failure = 0, None

    def add(self, name: str, part: Piece | CodedDelta) -> None:
        raise AssertionError(f"{name}: only the first rank has what was gathered")

    def exchange(self) -> None:
        return None

    def flush(self) -> None:
        return None

    def give_up(self, reason: str) -> None:
        return None


class BucketSender:
    """One rank's buckets on their way to the engine.

    Digests are taken and buckets announced, sent and waited for on a thread beside the caller's,
    while the next bucket is gathered.
    ``digests``: digest buckets as they are sent. ``zero_copy``: large tensors may be read where
    they lie. ``joined``: this is not the update's first stream, and ends by itself. ``small``: many
    short tensors are to come, which may be read where they lie even on a CPU. ``wire``: the dtype
    that a tensor of that name and dtype is digested in. ``headers``: of earlier updates.
    """

    def __init__(
        self, channel: WeightChannel, sender: Sender, stats: TransferStats, *,
        bucket_bytes: int, timeout: float, digests: bool = False, zero_copy: bool = False,
        joined: bool = False, small: bool = False,
        wire: WireDtype | None = None,
        headers: InPlaceHeaders | None = None,
    ) -> None:  # fmt: skip
        self._channel, self._sender, self._stats = channel, sender, stats
        self._timeout, self._joined = timeout, joined
        self._digests = digests
        self._small = small and sender.bytes_go == "channel" and channel.reads_in_place
        self._zero_copy = zero_copy and sender.bytes_go == "channel" and channel.reads_in_place
        self._packer = BucketPacker(
            min([bucket_bytes, *(buffer.numel() for buffer in sender.buffers)]),
            device=sender.device,
            wait_free=self._wait_free,
            buffers=sender.buffers,
            headers=headers,
        )
        self.bucket_bytes, self.buffers = self._packer.bucket_bytes, sender.buffers
        self._worker = BackgroundWorker("update-sender")
        self._given_out = 0  # the address of the last memory that a tensor may be gathered to
        self._gave_up: str | None = None
        self._wire = wire or (lambda name, dtype: dtype)
        self._stays = False
        self._left: list[tuple[str, Tensor]] = []  # not announced yet
        self._left_bytes = 0
        self.read_in_place = 0  # tensors
        self.packed_because = ""  # of the first that stayed where it was and had to be packed
        self.failure: RolloutError | None = None

    def connect(self) -> None:
        """Meet the engine's ranks, and the other members of a group that trainer ranks form."""
        self._sender.connect(self._channel, self._timeout)

    # ---- pieces ----

    def buffer_for(self, dtype: torch.dtype, shape: Shape) -> Tensor | None:
        """Where the next tensor may be gathered to: its place in a bucket."""
        if self.failure is not None:
            return None
        started = time.perf_counter()
        try:
            self._ship_all(self._packer.begin(prod(shape) * dtype.itemsize))
            buffer = self._packer.buffer_for(dtype, shape)
            self._given_out = 0 if buffer is None else buffer.data_ptr()
            return buffer
        except Exception as error:  # noqa: BLE001 - as in ``_attempt``
            self._fail(error, "a bucket")
            return None
        finally:
            self._stats.gather_seconds -= time.perf_counter() - started  # waits inside a gather

    def stays(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which the source leaves where and as it is, will be read there.

        Asked of every tensor before it is added: it need not be cast then.
        """
        self._stays = False
        on_cpu = tensor.device.type == "cpu"
        if (on_cpu and not self._small) or self.failure is not None or not tensor.numel():
            return False
        if not self._digests or tensor.dtype not in CASTABLE:
            why: str | None = "it is not a full update of plain floats by one rank"
        else:
            why = self._sender.why_packed(self._channel, tensor)
        if not on_cpu:
            self.packed_because = self.packed_because or why or ""
        self._stays = why is None
        return self._stays

    def add(self, name: str, part: Piece | CodedDelta) -> None:
        """Pack a piece, or what changed of it, and send full buckets."""
        self._attempt(repr(name), lambda: self._ship_all(self._packed(name, part)))

    def add_staying(self, items: Sequence[tuple[str, Tensor]]) -> bool:
        """As ``add`` of each, all of which are to be read where they lie; False where some are not,
        and then none was added.
        """
        stay = all(self.stays(tensor) for tensor in _one_of_each_kind(items))
        self._stays = False
        if stay:
            self._attempt("tensors where they lie", lambda: self._add_staying(items))
        return stay

    def _add_staying(self, items: Sequence[tuple[str, Tensor]]) -> None:
        for name, tensor in items:
            if self._put_aside(name, tensor):
                self._announce_in_place()

    def exchange(self) -> None:
        return None

    def flush(self) -> None:
        """Send what is left and wait until every rank has taken every bucket."""
        self._attempt("the last buckets", self._flush)

    # ---- rounds ----

    def send_round(self, header: BucketHeader, payload: Tensor) -> None:
        """Announce a round and send this rank's part of it; the round before has arrived then."""
        if self._gave_up is not None:
            raise DeadlineExceeded(self._gave_up)
        self._send(header, payload)
        if header.index:
            self._taken(header.index - 1)

    def announce(self, header: BucketHeader, payload: Tensor) -> None:
        """Announce a bucket that all ranks have written; its error is told by the next vote."""
        self._attempt(f"bucket {header.index}", lambda: self._send(header, payload))

    def give(self, tensors: Sequence[Tensor]) -> Given:
        """Where this rank's tensors lie, for ``announce_given``."""
        return self._sender.give(tensors)

    def announce_given(self, header: BucketHeader, given: Sequence[Given]) -> None:
        """As ``announce``, of what all ranks have given where it lies."""

        def act() -> None:
            started = time.perf_counter()
            self._sender.given(self._channel, header, given)
            self.read_in_place += len(header.entries)
            self._count(header, 0, started)

        self._attempt(f"bucket {header.index}", act)

    def taken(self, index: int) -> None:
        """Until every engine rank has taken bucket ``index``."""
        if self._gave_up is not None:
            raise DeadlineExceeded(self._gave_up)
        self._taken(index)

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has sent in rounds."""
        return self._sender.sent_bytes

    # ---- its end ----

    def give_up(self, reason: str) -> None:
        self._gave_up = reason
        self._channel.abort(reason)

    def close(self) -> None:
        self._worker.close()
        if self._joined:
            self._channel.close()
        self._packer.release()

    # ---- inside ----

    def _attempt(self, what: str, act: Callable[[], None]) -> None:
        """Keep an error, as one of the tree, for the next vote."""
        if self.failure is not None:
            return
        try:
            if self._gave_up is not None:
                raise DeadlineExceeded(self._gave_up)
            self._worker.check()
            act()
        except Exception as error:  # noqa: BLE001 - it must wait for the next vote, whatever it is
            self._fail(error, what)

    def _fail(self, error: Exception, what: str) -> None:
        if isinstance(error, RolloutError):
            self.failure = error
            return
        self.failure = TransferFailed(f"sending {what} failed: {error}")
        self.failure.__cause__ = error

    def _packed(self, name: str, part: Piece | CodedDelta) -> Packed:
        if isinstance(part, CodedDelta):
            return self._packer.add_delta(name, part)
        if self._stays:
            return self._where_it_lies(name, part.values)
        if self._reads_in_place(part.values):
            return self._in_place(name, part.values)
        return self._packer.add(name, part.values, (part.shape, part.box))

    def _where_it_lies(self, name: str, tensor: Tensor) -> Packed:
        self._stays = False
        if self._put_aside(name, tensor):
            yield from self._packer.flush()
            self._announce_in_place()

    def _put_aside(self, name: str, tensor: Tensor) -> bool:
        """To be announced with others; whether there is enough of it by now."""
        self._left.append((name, tensor))
        self._left_bytes += tensor.nbytes
        self.read_in_place += 1
        return self._left_bytes >= IN_PLACE_BYTES

    def _announce_in_place(self) -> None:
        """Have what was put aside digested, announced and read; nothing else is under way here."""
        parts, self._left, self._left_bytes = self._left, [], 0
        for header, regions in self._packer.in_place(parts) if parts else ():
            self._later(partial(self._ship_in_place, header, regions, [x for _, x in parts]))

    def _ship_in_place(
        self, header: BucketHeader, regions: Sequence[Tensor], tensors: Sequence[Tensor]
    ) -> None:
        self._stats.digest_in_place(header, tensors, self._wire)
        started = time.perf_counter()
        self._sender.in_place(self._channel, header, regions)
        self._count(header, sum(tensor.nbytes for tensor in tensors), started)

    def _reads_in_place(self, tensor: Tensor) -> bool:
        """Whether the engine, in this process, is to read the tensor where it lies."""
        dense = tensor.device.type == "cpu" and tensor.is_contiguous()
        if not (self._zero_copy and dense and tensor.nbytes >= MIN_ZERO_COPY):
            return False
        return tensor.data_ptr() != self._given_out  # else it lies in its bucket already

    def _in_place(self, name: str, tensor: Tensor) -> Packed:
        for header, payload in self._packer.zero_copy(name, tensor):
            yield header, payload
            if header.index:  # at most two are under way, as with buffers
                self._wait_free(header.index - 1)
        self._wait_free(self._packer.num_buckets - 1)  # its owner may write to it then

    def _ship_all(self, made: Packed) -> None:
        for header, payload in made:
            self._later(partial(self._ship, header, payload))

    def _flush(self) -> None:
        self._ship_all(self._packer.flush())
        self._announce_in_place()
        self._worker.wait()
        count = self._stats.num_buckets
        for index in range(max(0, count - 2), count):
            self._taken(index)
        if self._joined:
            self._channel.seal(Seal(num_buckets=count, digests={}))

    def _later(self, task: Callable[[], None]) -> None:
        """Run ``task`` beside this thread, on the stream on which it has been given the weights."""
        self._worker.do(on_this_stream(task))

    def _ship(self, header: BucketHeader, payload: Tensor) -> None:
        """Digest what a bucket holds of whole tensors, before others can reach it, and send it."""
        if self._digests:
            self._stats.digest_bucket(header, payload)
        self._send(header, payload)

    def _send(self, header: BucketHeader, payload: Tensor) -> None:
        started = time.perf_counter()
        self._sender.send(self._channel, header, payload)
        self._count(header, header.nbytes, started)

    def _count(self, header: BucketHeader, nbytes: int, started: float) -> None:
        stats = self._stats
        stats.num_buckets = header.index + 1
        if not header.is_in_place:
            stats.changed += sum(entry.changed for entry in header.entries)
        stats.wire_bytes += nbytes
        stats.transfer_seconds += time.perf_counter() - started

    def _wait_free(self, index: int) -> None:
        """Wait until a bucket's buffer may be packed again."""
        self._later(partial(self._taken, index))
        self._worker.wait()

    def _taken(self, index: int) -> None:
        started = time.perf_counter()
        self._sender.wait(self._channel, index, self._timeout)
        self._stats.transfer_seconds += time.perf_counter() - started


def _one_of_each_kind(items: Sequence[tuple[str, Tensor]]) -> Iterable[Tensor]:
    """Of those on a CPU; whether one on a GPU can be mapped depends on its own memory."""
    if any(tensor.device.type != "cpu" for _, tensor in items):
        return [tensor for _, tensor in items]
    return {(x.dtype, x.is_contiguous(), x.numel() > 0): x for _, x in items}.values()


class BackgroundWorker:
    """Runs tasks one after the other; after the first error it runs no more.

    ``do``, ``check`` and ``wait`` are called from one thread, ``close`` from any. ``wait`` ends
    because tasks have deadlines of their own. The thread starts with the first task.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[Callable[[], None] | threading.Event | None]
        self._tasks = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def do(self, task: Callable[[], None]) -> None:
        """Run ``task`` after those given before; raises what one of them has raised."""
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
        """Wait until all tasks given so far have run; raises what one of them has raised."""
        if self._thread is not None:
            done = threading.Event()
            self._tasks.put(done)
            done.wait()
        self.check()

    def close(self) -> None:
        """Begin no further task; does not wait for one that is running. The last call."""
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
