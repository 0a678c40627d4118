"""The gRPC service of weights: each ``Update`` stream is one lease on a ``WeightChannel``.

The channel's calls block, so every stream has a thread that makes them in order, fed by a bounded
queue (a full one stops reading the stream, and so the sender). When the stream ends without a
commit, for whatever reason, the channel is closed at once, also while that thread waits in it.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import torch

from rollout import rollout_pb2 as pb
from rollout import update_wire
from rollout.errors import TransferFailed
from rollout.rollout_pb2_grpc import WeightSyncServicer
from rollout.server.grpc_services import abort_with, answers, seconds
from rollout.updates import BucketHeader, WeightChannel

if TYPE_CHECKING:
    from rollout.api import AsyncRollout

MAX_BUCKET = 8 << 30  # bytes one bucket may announce; memory is only taken for what arrives
MAX_WAIT = 86400.0  # seconds
AHEAD = 8  # commands read before the first of them has run
_END = object()


class WeightSyncService(WeightSyncServicer):  # type: ignore[misc]
    def __init__(self, rollout: AsyncRollout) -> None:
        self._rollout = rollout

    @answers
    async def Info(self, request: Any) -> Any:  # noqa: N802
        info = await asyncio.to_thread(self._rollout.backend.info)
        return pb.WeightDocument(json=_json(update_wire.info_to_wire(info)))

    @answers
    async def Rollback(self, request: Any) -> Any:  # noqa: N802
        receipt = await self._rollout.rollback(seconds(request))
        return pb.WeightDocument(json=_json(update_wire.receipt_to_wire(receipt)))

    @answers
    async def Digests(self, request: Any) -> Any:  # noqa: N802
        digests = await asyncio.to_thread(self._rollout.backend.digests, seconds(request))
        return pb.DigestsResponse(digests=digests)

    @answers
    async def Receipts(self, request: Any) -> Any:  # noqa: N802
        receipts = await asyncio.to_thread(self._rollout.backend.receipts)
        documents = [
            pb.WeightDocument(json=_json(update_wire.receipt_to_wire(receipt)))
            for receipt in receipts
        ]
        return pb.ReceiptsResponse(receipts=documents)

    async def Update(self, commands: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        stream = _UpdateStream(self._rollout.backend.open())
        reading = asyncio.create_task(stream.feed(commands))
        try:
            while (event := await stream.events.get()) is not None:
                if isinstance(event, Exception):
                    await abort_with(context, event)
                yield event
        finally:
            reading.cancel()
            stream.end()


class _UpdateStream:
    """One stream's channel, its thread, and the queues between that thread and the loop."""

    def __init__(self, channel: WeightChannel) -> None:
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._room = asyncio.Semaphore(AHEAD)
        self.events: asyncio.Queue[Any] = asyncio.Queue()
        self._bucket: _IncomingBucket | None = None
        self._thread = threading.Thread(target=self._run, name="rollout-lease", daemon=True)
        self._thread.start()

    async def feed(self, commands: Any) -> None:
        """Hand the client's commands to the thread; their end is the lease's."""
        try:
            async for command in commands:
                await self._room.acquire()
                self._todo.put(command)
        finally:
            self._todo.put(_END)

    def end(self) -> None:
        """The stream is over. Closing takes no time to speak of, but may call every rank."""
        self._todo.put(_END)
        threading.Thread(target=self._channel.close, name="rollout-lease-end", daemon=True).start()

    def _run(self) -> None:
        """The thread: one call after the other until the stream ends or a call fails."""
        try:
            while (command := self._todo.get()) is not _END:
                event = self._do(command)
                self._tell(self._room.release)
                if event is not None:
                    self._tell(self.events.put_nowait, event)
                if command.WhichOneof("kind") == "abort":
                    break
        except Exception as error:  # noqa: BLE001 - the edge: it travels to the client
            self._tell(self.events.put_nowait, error)
        finally:
            self._channel.close()
            self._tell(self.events.put_nowait, None)

    def _tell(self, call: Any, *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call, *args)

    def _do(self, command: Any) -> Any:
        kind = command.WhichOneof("kind")
        if self._bucket is not None and kind not in ("chunk", "abort"):
            raise TransferFailed(f"bucket {self._bucket.header.index} ended early: {kind} came")
        if kind == "begin":
            request = update_wire.request_from_wire(_parsed(command.begin.json))
            begun = self._channel.begin(request)
            return pb.UpdateEvent(
                begun=pb.WeightDocument(json=_json(update_wire.begun_to_wire(begun)))
            )
        if kind == "bucket":
            return self._start_bucket(command.bucket)
        if kind == "chunk":
            return self._add_chunk(command.chunk)
        if kind == "wait":
            if not 0 <= command.wait.timeout <= MAX_WAIT:
                raise TransferFailed(
                    f"a wait of {command.wait.timeout} s: 0 to {MAX_WAIT} it may be"
                )
            self._channel.wait(command.wait.index, command.wait.timeout)
            return pb.UpdateEvent(taken=pb.Taken(index=command.wait.index))
        if kind == "seal":
            self._channel.seal(update_wire.seal_from_wire(_parsed(command.seal.json)))
            return pb.UpdateEvent(sealed=pb.Sealed())
        if kind == "commit":
            receipt = _json(update_wire.receipt_to_wire(self._channel.commit()))
            return pb.UpdateEvent(receipt=pb.WeightDocument(json=receipt))
        if kind == "abort":
            self._channel.abort(command.abort.reason)
            return None
        raise TransferFailed("an update command without a kind")

    def _start_bucket(self, message: Any) -> None:
        header = update_wire.header_from_wire(_parsed(message.header_json))
        if not message.HasField("payload_bytes"):
            self._channel.bucket(header, None)
            return
        if message.payload_bytes != header.nbytes or header.nbytes > MAX_BUCKET:
            raise TransferFailed(
                f"bucket {header.index} announces {message.payload_bytes} bytes for {header.nbytes}"
                f" (limit {MAX_BUCKET}); use smaller bucket_bytes"
            )
        self._bucket = _IncomingBucket(header)
        self._add_chunk(b"")

    def _add_chunk(self, chunk: bytes) -> None:
        bucket = self._bucket
        if bucket is None:
            raise TransferFailed("bytes without a bucket")
        bucket.data += chunk
        if len(bucket.data) > bucket.header.nbytes:
            raise TransferFailed(f"bucket {bucket.header.index} is longer than it announced")
        if len(bucket.data) == bucket.header.nbytes:
            self._bucket = None
            self._channel.bucket(bucket.header, bucket.tensor())


class _IncomingBucket:
    """A bucket whose bytes are arriving."""

    def __init__(self, header: BucketHeader) -> None:
        self.header, self.data = header, bytearray()

    def tensor(self) -> torch.Tensor:
        if not self.data:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.data, dtype=torch.uint8)


def _json(wire: Any) -> bytes:
    return json.dumps(wire, separators=(",", ":")).encode()


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise TransferFailed(f"malformed update message: {error}") from error
