"""One ``Update`` on the server: a ``WeightChannel``, its thread, and the connection that feeds it.

The channel's calls block, so every update has a thread that makes them in order, fed by a bounded
queue (a full one stops reading the connection, and so the sender). Without a grace the update ends
with its connection, at once and for whatever reason, also while that thread waits in the channel.
With one it is *held* when its connection ends:

    fed --connection ends--> held --resume, with the secret--> fed
                              |
                              +--nobody came within the grace--> aborted

A client cannot be seen to have gone on purpose but by its ``abort`` or its commit; one that died
holds the engine until the grace is over.
"""

from __future__ import annotations

import asyncio
import queue
import secrets
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Any

import torch

from rollout.config import MAX_TIMEOUT
from rollout.errors import RolloutError, TransferFailed, shortened
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import document
from rollout.server.grpc.lanes import Lane, Lanes
from rollout.server.grpc.relay import Relays
from rollout.server.grpc.services import checked
from rollout.server.grpc.sharing import SharingChannel
from rollout.weight_sync.protocol.bucket import check_size
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.header_reader import HeaderReader
from rollout.weight_sync.protocol.link import Forward, StreamOffer
from rollout.weight_sync.protocol.messages import BucketHeader, Seal, UpdateRequest
from rollout.wire.codec import from_json, parsed
from rollout.wire.frames import tensor_bytes

AHEAD = 8  # commands read before the first of them has run
# Answers are kept, as a next connection may ask for them again. Clients wait for a bucket up to
# three times, and little is asked besides.
ANSWERS, ANSWERS_A_BUCKET = 64, 4
_END = object()


@dataclass(frozen=True, slots=True)
class _LastOf:
    """Behind the last command of a connection that has no more."""

    turn: int


class HeldUpdates:
    """The updates of one service that a new connection may go on with; used in its loop alone."""

    def __init__(self, relays: Relays | None = None) -> None:
        self.relays, self._updates = relays or Relays(), dict[str, UpdateStream]()
        self.headers = HeaderReader()  # over all updates

    def find(self, resume: Any) -> UpdateStream:
        """The update that a resume or join names, if it knows its secret; or ``TransferFailed``."""
        found = self._updates.get(resume.update_id)
        if found is None or not secrets.compare_digest(
            found.secret.encode(), resume.secret.encode()
        ):
            raise TransferFailed(
                f"update {resume.update_id!r:.80} is not held here: its grace is over, or it "
                "ended; weight_info() tells which version is live"
            )
        return found

    def add(self, update_id: str, update: UpdateStream) -> None:
        self._updates[update_id] = update

    def remove(self, update: UpdateStream) -> None:
        self._updates = {k: u for k, u in self._updates.items() if u is not update}

    def end(self) -> None:
        """The server stops: no connection will come any more."""
        for update in list(self._updates.values()):
            update.end()


class UpdateStream:
    """One update; ``talk`` is one connection to it, of which the newest counts."""

    def __init__(self, channel: WeightChannel, held: HeldUpdates) -> None:
        self._channel, self._held = channel, held
        self._loop = asyncio.get_running_loop()
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(1)  # until it has begun: many may wait for the lease
        self._events: list[Any] = []  # to the client; an exception or None is the last
        self._received = 0  # commands, over all connections
        self._owed = 0  # of them, up to the last that the client's window counts
        self._news = asyncio.Event()
        self._turn = 0  # of the connection that counts
        self._reading: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._bucket: _IncomingBucket | None = None
        self._buckets = self._answers = 0  # of all connections
        self._over = self._left = self._ended = self._finished = False
        self._grace = 0.0
        self._limit = 0  # bytes of a bucket, as agreed on
        self.secret = ""
        self._shares: SharingChannel | None = None
        self.lanes: Lanes | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-lease", daemon=True)
        self._thread.start()

    async def talk(self, commands: Any, resume: Any = None) -> AsyncGenerator[Any]:
        """Answer one connection until the update or the connection ends.

        ``commands``: what it sends, ``resume`` aside. Raises the error that ended the update.
        """
        turn, seen = self._attach(commands), 0
        confirmed = -1 if resume is not None else self._owed
        if resume is not None:
            seen = min(resume.events, len(self._events))
        try:
            while self._turn == turn:
                self._news.clear()
                # What has arrived is said before what follows from it.
                if self.secret and confirmed < self._owed:
                    confirmed = self._received
                    yield pb.UpdateEvent(received=pb.Received(commands=confirmed))
                if seen < len(self._events):
                    event = self._events[seen]
                    if event is None:
                        self._left = True
                        return
                    if isinstance(event, Exception):
                        self._left = True
                        raise event
                    yield event
                    seen += 1
                    self._left = self._over and seen == len(self._events)
                elif confirmed >= self._owed or not self.secret:
                    await self._news.wait()
        finally:
            if self._turn == turn:
                self._detach()

    def fail(self, error: RolloutError) -> None:
        """The update is over, and its client is told; in the loop."""
        self._add(error)
        self.end(str(error))

    def end(self, why: str = "") -> None:
        """The update is over; ``why`` where it is aborted. Beside the loop: it may call ranks."""
        self._ended = True
        self._held.remove(self)
        if self._timer is not None:
            self._timer.cancel()
        if not why:
            self._todo.put(_END)
        threading.Thread(
            target=self._abort if why else self._channel.close, args=(why,) if why else (),
            name="rollout-lease-end", daemon=True,
        ).start()  # fmt: skip

    def _abort(self, why: str) -> None:
        """For this reason, and not for the channel's end."""
        try:
            self._channel.abort(why)
        finally:
            self._todo.put(_END)

    # ---- connections; in the loop ----

    def _attach(self, commands: Any) -> int:
        self._turn += 1
        if self._timer is not None:
            self._timer.cancel()
        if self._reading is not None:
            self._reading.cancel()
        self._news.set()  # an older connection sees that it counts no more
        self._news = asyncio.Event()
        self._reading = asyncio.create_task(self._feed(commands, self._turn))
        return self._turn

    def _detach(self) -> None:
        assert self._reading is not None
        self._reading.cancel()
        self._turn += 1  # what that connection still says does not count
        if not self.secret or self._grace <= 0 or (self._left and not self._over):
            self.end()
            return
        if self._over:  # its client may not have got the last answer
            self._wait_for(self.end)
            return
        why = f"its connection broke, and no other came within {self._grace:g} s"
        self._wait_for(self.end, why)

    def _hold(self, name: str, grace: float, secret: str) -> None:
        """From now on the update outlives its connection."""
        if self._ended:
            return
        self.secret, self._grace = secret, grace
        self._held.add(name, self)

    async def _feed(self, commands: Any, turn: int) -> None:
        """Hand a connection's commands to the thread; without a grace their end is the lease's."""
        try:
            while (command := await self._next(commands, turn)) is not _END:
                self._received += 1
                self._todo.put(command)
                if _has_bytes(command):
                    self._owed = self._received
                    self._news.set()
            if self.secret:
                self._todo.put(_LastOf(turn))
        finally:
            if not self.secret:
                self._todo.put(_END)

    async def _next(self, commands: Any, turn: int) -> Any:
        """What comes next, read once there is room; ``_END`` where nothing does, or counts."""
        await self._room.acquire()
        command = _END
        try:
            command = await anext(commands, _END)
            if self._turn != turn or self._finished:
                command = _END
        finally:
            if command is _END:
                self._room.release()
        return command

    def _let_in(self, count: int) -> None:
        for _ in range(count):
            self._room.release()

    def _finish(self) -> None:
        """The thread has ended: nothing keeps what it did not get to."""
        self._finished = True
        while not self._todo.empty():
            self._todo.get_nowait()
        self._add(None)

    def _said_all(self, turn: int) -> None:
        """All that this connection brings is done: it goes, another comes, or it is given up.

        A connection that breaks can look like this, too, until it is detached.
        """
        if turn == self._turn and not self._ended:
            self._wait_for(self._give_up)

    def _give_up(self) -> None:
        why = "its client ended the stream with neither a commit nor an abort"
        self._todo.put(_END if self._over else TransferFailed(why))

    def _wait_for(self, otherwise: Callable[..., Any], *args: Any) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(self._grace, otherwise, *args)

    # ---- the thread ----

    def _run(self) -> None:
        """One call after the other until the update ends or a call fails."""
        freed = AHEAD  # by the first
        try:
            while (command := self._todo.get()) is not _END:
                if isinstance(command, _LastOf):
                    self._tell(self._said_all, command.turn)
                    continue
                event = self._do(command)
                self._tell(self._let_in, freed)
                freed = 1
                if event is not None:
                    self._count_answer()
                    self._tell(self._add, event)
                if command.WhichOneof("kind") == "abort":
                    break
        except RolloutError as error:
            # Its traceback would keep a bucket's memory, in a cycle with this stream.
            self._tell(self._add, error.with_traceback(None))
        except Exception as error:  # noqa: BLE001 - the edge: it travels to the client
            self._tell(self._add, error)
        finally:
            self._bucket = None
            self._channel.close()
            self._tell(self._finish)

    def _add(self, event: Any) -> None:
        self._events.append(event)
        self._news.set()

    def _tell(self, call: Callable[..., Any], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _count_answer(self) -> None:
        self._answers += 1
        if self._answers > ANSWERS + ANSWERS_A_BUCKET * self._buckets:
            raise TransferFailed(
                f"{self._answers} answers were asked for, and {self._buckets} buckets announced: "
                "wait for each bucket once"
            )

    def _do(self, command: Any) -> Any:
        kind = checked(command).WhichOneof("kind")
        if self._bucket is not None and kind not in ("chunk", "abort"):
            raise TransferFailed(f"bucket {self._bucket.header.index} ended early: {kind} came")
        if kind == "join":
            return self._joined()
        if kind == "begin":
            return self._begin(UpdateRequest.read(parsed(command.begin.json)))
        if kind == "bucket":
            return self._start_bucket(command.bucket)
        if kind == "chunk":
            return self._add_chunk(command.chunk)
        if kind == "wait":
            if not 0 <= command.wait.timeout <= MAX_TIMEOUT:
                raise TransferFailed(
                    f"a wait of {command.wait.timeout} s: 0 to {MAX_TIMEOUT} it may be"
                )
            return self._wait(command.wait.index, command.wait.timeout)
        if kind == "forward":
            if self._shares is None:
                raise TransferFailed("this update's bytes go no further: its begin said nothing")
            problem = self._shares.forward(from_json(Forward, command.forward.json))
            return pb.UpdateEvent(forwarding=pb.Forwarding(problem=problem))
        if kind == "seal":
            seal = from_json(Seal, command.seal.json)
            self._channel.seal(seal)
            # A rank's part is sent, or the update waits for a decision: nobody needs the stream.
            self._over = type(self._channel) is Lane or seal.fence is not None
            return pb.UpdateEvent(sealed=pb.Sealed())
        if kind == "commit":
            receipt = self._channel.commit()
            self._over = True
            return pb.UpdateEvent(receipt=document(receipt))
        if kind == "abort":
            self._channel.abort(shortened(command.abort.reason))
            return None
        raise TransferFailed("an update command without a kind")

    def _begin(self, request: UpdateRequest) -> Any:
        self._limit = request.bucket_bytes
        stream = StreamOffer.of(request)
        if stream.shares or stream.relays:
            self._shares = SharingChannel(self._channel, self._held.relays)
            self._channel = self._shares
        begun = document(self._channel.begin(request))
        if not stream.grace:
            return pb.UpdateEvent(begun=begun)
        if stream.senders > 1:
            self.lanes = Lanes(self._channel, request)
            self._channel = self.lanes.first
        secret = secrets.token_hex(16)
        self._tell(self._hold, request.update_id, stream.grace, secret)
        return pb.UpdateEvent(begun=begun, secret=secret)

    def _wait(self, index: int, timeout: float) -> Any:
        lost, deadline = "", time.monotonic() + timeout
        if self._shares is not None:
            lost, index = self._shares.brought(index, timeout)
        if not lost:
            self._channel.wait(index, max(0.0, deadline - time.monotonic()))
        return pb.UpdateEvent(taken=pb.Taken(index=index, lost=lost))

    def _joined(self) -> Any:
        if type(self._channel) is not Lane:
            raise TransferFailed("a stream that carries an update joins no other")
        self._limit = self._channel.bucket_bytes
        secret = secrets.token_hex(16)
        self._tell(self._hold, self._channel.name, self._channel.grace, secret)
        return pb.UpdateEvent(begun=pb.WeightDocument(), secret=secret)

    def _start_bucket(self, message: Any) -> None:
        self._buckets += 1
        header = self._held.headers.read(message.header_json)
        if not message.HasField("payload_bytes"):
            self._channel.bucket(header, None)
            return
        check_size(header, self._limit)
        if header.messages:
            raise TransferFailed(f"bucket {header.index} has messages, and bytes on the channel")
        if message.payload_bytes != header.nbytes:
            raise TransferFailed(
                f"bucket {header.index} announces {message.payload_bytes} bytes for {header.nbytes}"
            )
        self._bucket = _IncomingBucket(header, self._channel.buffer(header.nbytes))
        self._add_chunk(b"")

    def _add_chunk(self, chunk: bytes | memoryview) -> None:
        bucket = self._bucket
        if bucket is None:
            raise TransferFailed("bytes without a bucket")
        whole = bucket.add(chunk)
        if self._shares is not None:
            self._shares.arrived(bucket.have)
        if whole:
            self._bucket = None
            self._channel.bucket(bucket.header, bucket.payload)


def _has_bytes(command: Any) -> bool:
    """Whether it is of a bucket that comes on the stream: of all else its answer says enough."""
    if isinstance(command, RolloutError):
        return False
    kind = command.WhichOneof("kind")
    return bool(kind == "chunk" or (kind == "bucket" and command.bucket.HasField("payload_bytes")))


class _IncomingBucket:
    """A bucket whose bytes are arriving, in ``buffer`` if there is one.

    Other memory takes no pages but for what has arrived, whatever was announced.
    """

    def __init__(self, header: BucketHeader, buffer: torch.Tensor | None) -> None:
        nbytes = header.nbytes
        self.header = header
        self.payload = torch.empty(nbytes, dtype=torch.uint8) if buffer is None else buffer
        self._left = tensor_bytes(self.payload)

    @property
    def have(self) -> int:
        return self.header.nbytes - len(self._left)

    def add(self, chunk: bytes | memoryview) -> bool:
        """Whether that was the last of it."""
        if len(chunk) > len(self._left):
            raise TransferFailed(f"bucket {self.header.index} is longer than it announced")
        if chunk:
            self._left[: len(chunk)] = chunk
            self._left = self._left[len(chunk) :]
        return not self._left
