"""One update's lease over one gRPC stream: ``WeightChannel`` on the trainer's side."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import grpc
from torch import Tensor

from rollout.errors import DeadlineExceeded, EngineClosed, RolloutError, TransferFailed
from rollout.rpc import rollout_pb2 as pb
from rollout.rpc.chunks import UPDATE, command_to_wire, document
from rollout.rpc.connection import Connection, uninterrupted
from rollout.rpc.outbox import Outbox
from rollout.rpc.status import error_from_rpc, is_typed, reason
from rollout.weight_sync.protocol.link import Forward, StreamOffer
from rollout.weight_sync.protocol.messages import Begun, BucketHeader, Seal, UpdateRequest
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.wire.codec import from_json, to_json
from rollout.wire.frames import tensor_bytes
from rollout.wire.repeated import RepeatedWriter

GRACE = 1.0  # seconds a reply may be later than the server's own deadline
PAUSE = 0.1  # seconds between attempts to reach the server again
_LOST = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
        grpc.StatusCode.CANCELLED,
    }
)  # what a broken connection looks like, where no server of ours wrote the error


REACH = "members of a fleet have to reach each other at the addresses that its front has"


def feed(channel: grpc.Channel, metadata: Any, commands: Iterator[Any], timeout: float) -> Any:
    """The call of a feed, once it was answered; ``grpc.RpcError`` where it was not, and
    ``DeadlineExceeded`` where nothing came.
    """
    call = _update_of(channel)(commands, metadata=metadata)
    late = threading.Event()

    def give_up() -> None:
        late.set()
        call.cancel()

    watch = threading.Timer(timeout, give_up)
    watch.daemon = True
    watch.start()
    try:
        next(call)
    except grpc.RpcError as error:
        if not late.is_set():
            raise
        raise DeadlineExceeded(f"no answer within {timeout:g} s; {REACH}") from error
    finally:
        watch.cancel()
    return call


def _update_of(channel: grpc.Channel) -> Any:
    return channel.stream_stream(
        UPDATE,
        request_serializer=command_to_wire,
        response_deserializer=pb.UpdateEvent.FromString,
    )


class GrpcWeightChannel:
    """Commands go out in order, each but a bucket is answered by one event; the server makes the
    same calls on the engine's channel that this one receives. Buckets are pipelined: a failure of
    one is raised by the next call. The end of the stream is the end of the lease, but where the
    request has a ``grace``: then a broken connection is made anew within it, and the update goes
    on behind what has arrived.
    """

    reads_in_place = False

    def __init__(
        self,
        connection: Connection,
        *,
        check_partial: Callable[[], None],
        committed: Callable[..., None],
        requests: RepeatedWriter,
    ) -> None:
        self._connection, self._channel = connection, connection.sync()
        self._update = _update_of(self._channel)
        self._address, self._metadata = connection.address, connection.metadata
        self._check_partial, self._committed = check_partial, committed
        self._requests = requests
        self._aborted: str | None = None
        self._outbox = Outbox()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._request: UpdateRequest | None = None
        self._grace = 0.0
        self._begun = self._joined = self._ended = False
        self._secret = ""
        self._events = 0  # how many have arrived
        self._replaced = 0  # connections
        self._refusal = ""  # why another one could not go on

    def begin(self, request: UpdateRequest) -> Begun:
        if request.builds_on_live:
            self._check_partial()
        self._open(request)
        self._send(begin=document(request, self._requests.to_json))
        event = self._reply("begun", request.timeout + GRACE)
        begun = from_json(Begun, event.json)
        self._begun = True
        return begun

    def join(self, request: UpdateRequest, secret: str, lane: int) -> None:
        """Carry trainer rank ``lane``'s buckets of the update that ``request`` began elsewhere.

        ``secret``: what that stream was told. ``bucket`` and ``wait`` are as ever; ``seal`` says
        that everything of this rank has been taken, and is the end.
        """
        self._open(replace(request, update_id=f"{request.update_id}/{lane}"))
        self._send(join=pb.Join(update_id=request.update_id, secret=secret, lane=lane))
        self._reply("begun", request.timeout + GRACE)
        self._begun = self._joined = True

    @property
    def secret(self) -> str:
        """What other streams of this update have to know; "" where there is no grace."""
        return self._secret

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        self._raise_early()
        head = to_json(header)
        if payload is None:
            self._send(bucket=pb.Bucket(header_json=head))
            return
        data = tensor_bytes(payload)
        bucket = pb.Bucket(header_json=head, payload_bytes=data.nbytes)
        self._outbox.put_bucket(pb.UpdateCommand(bucket=bucket), data)

    def buffer(self, nbytes: int) -> Tensor | None:
        return None  # chunks are sent from wherever they lie

    def wait(self, index: int, timeout: float) -> None:
        first, lost = self.took(index, timeout)
        if lost:
            raise TransferFailed(f"{self._address} has no bucket {first}: {lost}")

    def took(self, index: int, timeout: float) -> tuple[int, str]:
        """``wait`` for a bucket that a feed may have brought: the first one that it did not bring,
        and why; "" where it did. From that one on they are to be sent again, with their bytes.
        """
        end = self._send(wait=pb.Wait(index=index, timeout=timeout))
        taken = self._reply("taken", timeout + GRACE, f"bucket {index}")
        # Its buffer is the caller's again: it must not be read from here on.
        self._outbox.received(end)
        return taken.index, str(taken.lost)

    def forward(self, wanted: Forward) -> str:
        """Have the engine take what comes on to another; why it cannot, "" where it does."""
        self._send(forward=document(wanted))
        return str(self._reply("forwarding", wanted.timeout + GRACE).problem)

    def seal(self, seal: Seal) -> None:
        if self._replaced:
            resent = {
                "connections_replaced": str(self._replaced),
                "resent_bytes": str(self._outbox.resent_bytes),
                "resent_buckets": str(self._outbox.resent_buckets),
            }
            seal = replace(seal, details={**seal.details, **resent})
        self._send(seal=document(seal))
        self._reply("sealed", 2 * self._timeout + GRACE)  # the last buckets, then the vote
        self._ended = self._joined or seal.fence is not None

    def commit(self) -> UpdateReceipt:
        assert self._request is not None, "commit before begin"
        self._send(commit=pb.Commit())
        # Draining, a boundary, and the commit itself or going back from it have deadlines there.
        event = self._reply("receipt", 6 * self._timeout + GRACE)
        receipt = from_json(UpdateReceipt, event.json)
        self._ended = True
        self._committed(receipt, partial=self._request.builds_on_live)
        return receipt

    def abort(self, reason: str) -> None:
        """From any thread; a call that is waiting, or comes later, raises ``TransferFailed``."""
        if self._aborted is not None or (self._reader is None and self._ended):
            return
        reader = self._reader or self._start()
        self._aborted = reason
        self._outbox.abort(pb.UpdateCommand(abort=pb.AbortUpdate(reason=reason)))
        # The server ends the stream when it is done.
        reader.join(min(self._timeout or GRACE, 5.0))
        self.close()

    def close(self) -> None:
        if self._call is None or self._reader is None:
            return
        if self._secret and not self._ended:
            self._ended = True
            # A stream that merely ends would be waited for by the server.
            why = pb.AbortUpdate(reason="the channel was closed before the commit")
            self._outbox.abort(pb.UpdateCommand(abort=why))
            self._reader.join(GRACE)
        self._ended = True
        self._outbox.close()
        uninterrupted(self._call.cancel)
        self._reader.join(GRACE)
        self._outbox.drop()

    # ---- helpers ----

    @property
    def _timeout(self) -> float:
        return self._request.timeout if self._request is not None else 0.0

    def _open(self, request: UpdateRequest) -> None:
        assert self._call is None, "a channel carries one update"
        self._request, self._grace = request, StreamOffer.of(request).grace
        self._outbox = Outbox(keep=self._grace > 0, window=request.bucket_bytes)
        self._start()

    def _start(self) -> threading.Thread:
        try:
            self._call = uninterrupted(
                lambda: self._update(self._outbox.messages(), metadata=self._metadata)
            )
        except ValueError as error:  # gRPC's word for a channel that is closed
            raise EngineClosed(self._connection.closed_text) from error
        self._reader = threading.Thread(target=self._read, name="rollout-update", daemon=True)
        self._reader.start()
        return self._reader

    def _send(self, **kind: Any) -> int:
        """How many messages there are then: an answer says that all of them have arrived."""
        return self._outbox.put(pb.UpdateCommand(**kind))

    def _read(self) -> None:
        """The reader thread: events, then the error that ended the stream, or its end."""
        while True:
            try:
                for event in self._call:
                    self._take(event)
                break
            except grpc.RpcError as error:
                if not self._lost(error) or not self._connect_again():
                    self._inbox.put(self._failure(error))
                    break
        why = f"aborted: {self._aborted}" if self._aborted else "its stream ended"
        self._inbox.put(TransferFailed(f"the update at {self._address} is over: {why}"))

    def _take(self, event: Any) -> None:
        if event.WhichOneof("kind") == "received":
            self._outbox.received(event.received.commands)
            return
        self._events += 1
        if event.secret:
            self._secret = event.secret
        self._inbox.put(event)

    def _lost(self, error: Any) -> bool:
        """Whether the connection broke, on a stream that another one may replace."""
        over = self._ended or self._aborted is not None or self._is_closed
        return bool(self._secret) and not over and not is_typed(error) and error.code() in _LOST

    def _connect_again(self) -> bool:
        """Replace the broken call by one that goes on behind it, within the grace."""
        deadline = time.monotonic() + self._grace
        while (left := deadline - time.monotonic()) > 0 and not self._ended and not self._aborted:
            try:
                call = self._update(self._going_on(self._outbox.suspend()), metadata=self._metadata)
            except ValueError:  # closed here meanwhile: nobody waits for it
                return False
            watch = threading.Timer(left, call.cancel)
            watch.daemon = True
            watch.start()
            try:
                first = next(call)
                self._call = call
                self._replaced += 1
                self._outbox.go_on(first.received.commands)
                if self._ended:
                    call.cancel()
                return True
            except (grpc.RpcError, StopIteration) as error:
                if isinstance(error, StopIteration):
                    return False
                if is_typed(error):  # it is not held any more
                    self._refusal = reason(error.details())
                    return False
                time.sleep(min(PAUSE, left))
            finally:
                watch.cancel()
        return False

    def _going_on(self, turn: int) -> Iterator[Any]:
        assert self._request is not None
        yield pb.UpdateCommand(
            resume=pb.Resume(
                update_id=self._request.update_id, secret=self._secret, events=self._events
            )
        )
        yield from self._outbox.messages(turn)

    def _reply(self, kind: str, timeout: float, what: str = "") -> Any:
        phase = f"phase: {what or kind}"
        try:
            got = self._inbox.get(timeout=timeout)
        except queue.Empty:
            self.close()
            raise DeadlineExceeded(
                f"{self._address} did not answer within {timeout:g} s ({phase})"
            ) from None
        if isinstance(got, RolloutError):
            self._inbox.put(got)  # whatever is called next fails the same way
            self.close()
            raise got
        if got.WhichOneof("kind") != kind:
            self.close()
            raise TransferFailed(f"{self._address} answered {got.WhichOneof('kind')} ({phase})")
        return getattr(got, kind)

    @property
    def _is_closed(self) -> bool:
        return self._connection.was_closed(self._channel)

    def _failure(self, error: Any) -> RolloutError:
        if self._is_closed and not is_typed(error):
            return EngineClosed(self._connection.closed_text)
        lost = error.code() is grpc.StatusCode.UNAVAILABLE or (
            self._secret and error.code() in _LOST and not self._aborted
        )
        if self._begun and lost and not is_typed(error):
            return TransferFailed(
                f"the link to {self._address} broke during the update{self._within}: "
                f"{reason(error.details())}; weight_info() tells which version is live"
            )
        return error_from_rpc(error, self._address)

    @property
    def _within(self) -> str:
        if self._refusal:
            return f" and could not be made again ({self._refusal})"
        return f" and could not be made again within {self._grace:g} s" if self._secret else ""

    def _raise_early(self) -> None:
        """Between replies nothing arrives but the error of an earlier bucket."""
        if not self._inbox.empty():
            self._reply("nothing", 0.0, "bucket")
