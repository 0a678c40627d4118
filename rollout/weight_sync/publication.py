"""The sender's part of one update: meet the engine, agree on how, send, seal and commit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

from torch import Tensor

from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineClosed,
    RequestAborted,
    RolloutError,
    SourceFailed,
    TransferFailed,
    VersionConflict,
)
from rollout.kernels import digest
from rollout.update_wire import info_to_wire, receipt_to_wire, rendezvous_to_wire
from rollout.updates import BucketHeader, Seal, UpdateRequest, WeightChannel, WeightInfo
from rollout.weight_sync.bucket import BucketPacker
from rollout.weight_sync.delta import DeltaBase
from rollout.weight_sync.encodings import Encoder
from rollout.weight_sync.options import UpdateOptions
from rollout.weight_sync.source import WeightSource
from rollout.weight_sync.survey import PlanCache, Survey
from rollout.weight_sync.transports import (
    Road,
    Sender,
    SpreadSender,
    is_spread,
    make_sender,
    roads,
)
from rollout.weights import Box, TensorMeta, UpdateReceipt

_POLL = 0.05  # seconds between questions about a commit whose reply was lost


class WeightLink(Protocol):
    """How a trainer reaches an engine: in process, or ``RolloutClient``."""

    def info(self) -> WeightInfo: ...

    def open(self) -> WeightChannel: ...

    def receipts(self) -> tuple[UpdateReceipt, ...]: ...

    @property
    def local_address(self) -> str:
        """The address of this machine as the engine reaches it."""
        ...


class Publication:
    """The sender's open update; on the other ranks it stays unopened."""

    def __init__(
        self, options: UpdateOptions, base: DeltaBase | None, plans: PlanCache | None = None
    ) -> None:
        self._options, self._base = options, base
        self._plans = plans if plans is not None else PlanCache()
        self._encoder: Encoder | None = None
        self._road: Road | None = None
        self._link: WeightLink | None = None
        self._connect: Callable[[], WeightLink] | None = None
        self._channel: WeightChannel | None = None
        self._sender: Sender | None = None
        self._packer: BucketPacker | None = None
        self._info: WeightInfo | None = None
        self._survey: Survey | None = None
        self._update_id = uuid.uuid4().hex
        self._digests: dict[str, int] = {}
        self._num_bytes = 0
        self._wire_bytes = 0
        self._sent: list[int] = []  # by trainer rank, where each sends
        self._num_buckets = 0
        self._started = time.perf_counter()
        self.gather_seconds = 0.0
        self._transfer_seconds = 0.0
        self._digest_seconds = 0.0
        self.failure: RolloutError | None = None
        self._gave_up: str | None = None

    def meet(self, connect: Callable[[], WeightLink]) -> dict[str, Any]:
        self._connect = connect
        self._link = connect()
        self._info = self._link.info()
        transport = self._options.transport
        auto = transport == "auto" and "p2p" in self._info.transports
        look = "asked" if is_spread(transport) else "auto" if auto else ""
        return {"info": info_to_wire(self._info), "look": look}

    def begin(self, source: WeightSource, survey: Survey | None = None) -> dict[str, Any]:
        """Open the update on the best road and in the best encoding that the engine takes.

        Nothing of the source is read before that: what fails here is tried in the next best way.
        ``survey``: what trainer ranks hold, where that was looked into.
        """
        assert self._info is not None
        self._encoder = Encoder(self._options, self._info, self._base)
        try:
            metadata = source.metadata()
        except RolloutError:
            raise
        except Exception as error:  # the trainer's own code
            raise source_failed(error, "") from error
        self._survey = survey
        ways = list(
            roads(self._options.transport, self._info)
            if survey is None
            else roads(self._options.transport, self._info, survey.problem, survey.split)
        )
        while True:
            try:
                return self._open(ways[0], metadata)
            except (VersionConflict, EngineBroken) as error:
                self._give_back()
                if self._encoder.encoding == "full":
                    raise
                self._encoder.fall_back(f"the engine refused a delta: {error}")
            except (TransferFailed, ConfigError, DeadlineExceeded) as error:
                self._give_back()
                if len(ways) == 1:
                    raise
                del ways[0]
                ways[0] = Road(ways[0].transport, f"{ways[0].reason}: {error}")

    def _open(self, road: Road, metadata: tuple[TensorMeta, ...] | None) -> dict[str, Any]:
        assert self._link is not None
        assert self._info is not None
        assert self._encoder is not None
        options, timeout = self._options, self._options.timeout
        self._update_id = uuid.uuid4().hex
        self._road = road
        sender = self._sender = make_sender(
            road.transport, self._info, timeout, self._link.local_address
        )
        survey = self._survey if is_spread(road.transport) else None
        if survey is not None:
            cast(SpreadSender, sender).spread(len(survey.have))
            self._encoder.send_whole("boxes go straight from rank to rank")
        buffers = sender.buffers(options.bucket_bytes)
        channel = self._channel = self._link.open()
        begun = channel.begin(
            UpdateRequest(
                update_id=self._update_id,
                version=options.version,
                base=self._encoder.base,
                encoding=self._encoder.encoding,
                metadata=metadata,
                partial=options.partial,
                transport=sender.name,
                rendezvous=sender.rendezvous(),
                bucket_bytes=options.bucket_bytes,
                staging=options.staging,
                in_flight=options.in_flight,
                label=options.label,
                timeout=timeout,
                shared=sender.shared(),
                senders=1 if survey is None else len(survey.have),
                layout="" if survey is None else self._plans.layout,
            )
        )
        if survey is not None:
            # Every trainer rank connects, after it has been told where.
            where = sender.rendezvous()
            assert where is not None
            wants = self._plans.wants_for(begun, survey)
            return {"p2p": {"where": rendezvous_to_wire(where), **wants}}
        sender.connect(channel, timeout)
        self._packer = BucketPacker(
            min([options.bucket_bytes, *(buffer.numel() for buffer in buffers)]),
            device=self._wire_device(),
            wait_free=self._wait_free,
            buffers=buffers,
        )
        return {"version": begun.version}

    def connect(self) -> None:
        """Meet the other members of a group that trainer ranks form, too."""
        assert self._sender is not None
        assert self._channel is not None
        self._sender.connect(self._channel, self._options.timeout)

    def send_round(self, header: BucketHeader, payload: Tensor) -> None:
        """Announce a round and send this rank's part of it; the round before has arrived then."""
        if self._gave_up is not None:
            raise DeadlineExceeded(self._gave_up)
        self._send(header, payload)
        if header.index:
            self._wait_free(header.index - 1)

    @property
    def sent_bytes(self) -> int:
        """What this rank alone has sent in rounds."""
        return cast(SpreadSender, self._sender).sent_bytes

    def end_rounds(
        self, metadata: Sequence[TensorMeta], digests: Mapping[str, int], sent: Sequence[int]
    ) -> None:
        """Every round has arrived; ``sent``: the bytes that left each trainer rank."""
        self._digests = dict(digests)
        self._num_bytes = sum(meta.nbytes for meta in metadata)
        self._wire_bytes, self._sent = sum(sent), list(sent)

    def _give_back(self) -> None:
        """Let go of an attempt that failed before anything was sent."""
        self.close()
        self._sender = self._channel = None

    def _wire_device(self) -> str:
        assert self._sender is not None
        nccl = self._sender.rendezvous()
        return "cuda" if nccl is not None and nccl.backend == "nccl" else "cpu"

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest, pack and send one tensor; an error is kept for the next vote."""
        if self.failure is not None:
            return
        assert self._packer is not None
        assert self._encoder is not None
        assert self._info is not None
        try:
            if self._gave_up is not None:
                raise DeadlineExceeded(self._gave_up)
            tensor = tensor.detach()
            if tensor.is_floating_point() and tensor.dtype != self._info.dtype:
                tensor = tensor.to(self._info.dtype)
            started = time.perf_counter()
            shape = tuple(tensor.shape)
            self._digests[name] = digest(tensor, shape, Box.full(shape))
            self._digest_seconds += time.perf_counter() - started
            self._num_bytes += tensor.nbytes
            delta = self._encoder.delta(name, tensor, self._packer.bucket_bytes)
            packed = (
                self._packer.add(name, tensor)
                if delta is None
                else self._packer.add_delta(name, delta)
            )
            for header, payload in packed:
                self._send(header, payload)
        except RolloutError as error:
            self.failure = error
        except Exception as error:  # noqa: BLE001 - it must wait for the next vote, whatever it is
            self.failure = TransferFailed(f"sending {name!r} failed: {error}")
            self.failure.__cause__ = error

    def flush(self) -> None:
        """Send what is left and wait until every rank has taken every bucket."""
        if self.failure is not None:
            return
        try:
            for header, payload in self._packer.flush() if self._packer is not None else ():
                self._send(header, payload)
            for index in range(max(0, self._num_buckets - 2), self._num_buckets):
                self._wait_free(index)
        except RolloutError as error:
            self.failure = error

    def finish(self) -> dict[str, Any]:
        """Seal and commit."""
        assert self._channel is not None
        assert self._sender is not None
        assert self._encoder is not None
        self._sender.close()
        self._channel.seal(
            Seal(
                num_buckets=self._num_buckets,
                digests=self._digests,
                gather_seconds=self.gather_seconds,
                transfer_seconds=self._transfer_seconds,
                wire_bytes=self._wire_bytes,
                details=self._details(),
            )
        )
        try:
            receipt = self._channel.commit()
        except (DeadlineExceeded, EngineClosed, RequestAborted, TransferFailed) as error:
            receipt = self._committed_after_all(error)
        self._encoder.settle(receipt.epoch, receipt.version, self._wire_bytes, self._num_bytes)
        timings = {**receipt.timings, "total": time.perf_counter() - self._started}
        return {"receipt": receipt_to_wire(replace(receipt, timings=timings))}

    def give_up(self, reason: str) -> None:
        """From the watchdog's thread: free the engine's side; this side is in a collective."""
        self._gave_up = reason
        channel = self._channel
        if channel is not None:
            channel.abort(reason)

    def close(self) -> None:
        """Abort what did not commit, and let go of the road and the channel."""
        self._packer = None  # its buffers go now, not when the cycle of callbacks is collected
        for part in (self._sender, self._channel):
            if part is not None:
                part.close()

    def _send(self, header: BucketHeader, payload: Tensor) -> None:
        assert self._channel is not None
        assert self._sender is not None
        started = time.perf_counter()
        self._sender.send(self._channel, header, payload)
        self._num_buckets = header.index + 1
        self._wire_bytes += header.nbytes
        self._transfer_seconds += time.perf_counter() - started

    def _wait_free(self, index: int) -> None:
        assert self._channel is not None
        assert self._sender is not None
        started = time.perf_counter()
        self._sender.wait(self._channel, index, self._options.timeout)
        self._transfer_seconds += time.perf_counter() - started

    def _committed_after_all(self, lost: RolloutError) -> UpdateReceipt:
        """A reply may be lost after the commit began: the engine says how it ended."""
        assert self._connect is not None
        deadline = time.monotonic() + 5 * self._options.timeout
        while True:
            try:
                link = self._connect()
                state = link.info().state
                ours = [r for r in link.receipts() if r.update_id == self._update_id]
            except RolloutError:
                raise lost from None
            if ours:
                why = "the commit's reply was lost; the engine's own receipt was asked for"
                return replace(ours[0], details={**ours[0].details, "recovered": why})
            if state not in ("staged", "committing") or time.monotonic() > deadline:
                raise lost
            time.sleep(_POLL)

    def _details(self) -> dict[str, str]:
        """What the receipt says about how it went."""
        assert self._encoder is not None
        assert self._road is not None
        sent = {"sent_bytes": ",".join(map(str, self._sent))} if self._sent else {}
        return {
            **sent,
            "digest_seconds": f"{self._digest_seconds:.6f}",
            "transport_reason": self._road.reason,
            "encoding": self._encoder.encoding,
            "encoding_reason": self._encoder.reason,
        }


def source_failed(error: Exception, last: str) -> SourceFailed:
    """An exception of the trainer's own code, after tensor ``last``, as one of the tree."""
    after = f" after {last!r}" if last else ""
    failed = SourceFailed(f"the source raised{after}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
