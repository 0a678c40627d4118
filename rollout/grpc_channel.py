"""One update's lease over one gRPC stream: ``WeightChannel`` on the trainer's side."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from torch import Tensor

from rollout import rollout_pb2 as pb
from rollout import update_wire
from rollout.errors import (
    DeadlineExceeded,
    RolloutError,
    TransferFailed,
)
from rollout.grpc_status import CHUNK, error_from_rpc, is_typed
from rollout.updates import Begun, BucketHeader, Seal, UpdateRequest
from rollout.weights import UpdateReceipt
from rollout.wire import tensor_bytes

GRACE = 1.0  # seconds a reply may be later than the server's own deadline
_END = object()


class GrpcWeightChannel:
    """Commands go out in order, each but a bucket is answered by one event; the server makes the
    same calls on the engine's channel that this one receives. Buckets are pipelined: a failure of
    one is raised by the next call. The end of the stream is the end of the lease.
    """

    def __init__(
        self,
        stub: Any,
        address: str,
        metadata: tuple[tuple[str, str], ...],
        *,
        check_partial: Callable[[], None],
        committed: Callable[..., None],
    ) -> None:
        self._stub, self._address, self._metadata = stub, address, metadata
        self._check_partial, self._committed = check_partial, committed
        self._aborted: str | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._call: Any = None
        self._reader: threading.Thread | None = None
        self._request: UpdateRequest | None = None
        self._begun = False

    def begin(self, request: UpdateRequest) -> Begun:
        assert self._call is None, "a channel carries one update"
        if request.partial:
            self._check_partial()
        self._request = request
        self._call = self._stub.Update(self._commands(), metadata=self._metadata)
        self._reader = threading.Thread(target=self._read, name="rollout-update", daemon=True)
        self._reader.start()
        self._send(begin=_document(update_wire.request_to_wire(request)))
        event = self._reply("begun", request.timeout + GRACE)
        begun = update_wire.begun_from_wire(json.loads(event.json))
        self._begun = True
        return begun

    def bucket(self, header: BucketHeader, payload: Tensor | None) -> None:
        self._raise_early()
        head = json.dumps(update_wire.header_to_wire(header)).encode()
        if payload is None:
            self._send(bucket=pb.Bucket(header_json=head))
            return
        data = tensor_bytes(payload)
        self._send(bucket=pb.Bucket(header_json=head, payload_bytes=data.nbytes))
        for start in range(0, data.nbytes, CHUNK):
            self._send(chunk=bytes(data[start : start + CHUNK]))

    def wait(self, index: int, timeout: float) -> None:
        self._send(wait=pb.Wait(index=index, timeout=timeout))
        self._reply("taken", timeout + GRACE, f"bucket {index}")

    def seal(self, seal: Seal) -> None:
        self._send(seal=_document(update_wire.seal_to_wire(seal)))
        self._reply("sealed", 2 * self._timeout + GRACE)  # the last buckets, then the vote

    def commit(self) -> UpdateReceipt:
        assert self._request is not None, "commit before begin"
        self._send(commit=pb.Commit())
        # Draining, a boundary, and the commit itself or going back from it have deadlines there.
        event = self._reply("receipt", 6 * self._timeout + GRACE)
        receipt = update_wire.receipt_from_wire(json.loads(event.json))
        self._committed(receipt, partial=self._request.partial)
        return receipt

    def abort(self, reason: str) -> None:
        """From any thread; a call that is waiting, or comes later, raises ``TransferFailed``."""
        if self._reader is None or self._aborted is not None:
            return
        self._aborted = reason
        self._send(abort=pb.AbortUpdate(reason=reason))
        self._outbox.put(_END)
        self._reader.join(min(self._timeout, 5.0))  # the server ends the stream when it is done
        self.close()

    def close(self) -> None:
        if self._call is None or self._reader is None:
            return
        self._outbox.put(_END)
        self._call.cancel()
        self._reader.join(GRACE)

    # ---- helpers ----

    @property
    def _timeout(self) -> float:
        return self._request.timeout if self._request is not None else 0.0

    def _commands(self) -> Iterator[Any]:
        while (command := self._outbox.get()) is not _END:
            yield command

    def _send(self, **kind: Any) -> None:
        self._outbox.put(pb.UpdateCommand(**kind))

    def _read(self) -> None:
        """The reader thread: events, then the error that ended the stream, or its end."""
        try:
            for event in self._call:
                self._inbox.put(event)
        except grpc.RpcError as error:
            self._inbox.put(self._failure(error))
        why = f"aborted: {self._aborted}" if self._aborted else "its stream ended"
        self._inbox.put(TransferFailed(f"the update at {self._address} is over: {why}"))

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

    def _failure(self, error: Any) -> RolloutError:
        if self._begun and error.code() is grpc.StatusCode.UNAVAILABLE and not is_typed(error):
            return TransferFailed(
                f"the link to {self._address} broke during the update: {error.details()}; "
                "weight_info() tells which version is live"
            )
        return error_from_rpc(error, self._address)

    def _raise_early(self) -> None:
        """Between replies nothing arrives but the error of an earlier bucket."""
        if not self._inbox.empty():
            self._reply("nothing", 0.0, "bucket")


def _document(wire: Any) -> Any:
    return pb.WeightDocument(json=json.dumps(wire, separators=(",", ":")).encode())
