"""The sender's part of one update: meet the engine, agree on how, send, seal and commit."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, cast

import torch
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
from rollout.update_wire import (
    info_to_wire,
    receipt_to_wire,
    rendezvous_to_wire,
    request_to_wire,
)
from rollout.updates import BucketHeader, Seal, UpdateRequest, WeightChannel, WeightInfo
from rollout.weight_sync.beside import Beside
from rollout.weight_sync.bucket import BucketPacker
from rollout.weight_sync.delta import CodedDelta, DeltaBase
from rollout.weight_sync.digests import total
from rollout.weight_sync.encodings import Encoder
from rollout.weight_sync.link import WeightLink, receipt_of
from rollout.weight_sync.options import UpdateOptions
from rollout.weight_sync.source import WeightSource
from rollout.weight_sync.survey import PlanCache, Survey, shard_layout
from rollout.weight_sync.transports import (
    Road,
    Sender,
    SpreadSender,
    is_per_rank,
    is_spread,
    make_sender,
    roads,
)
from rollout.weights import Box, Shape, TensorMeta, TensorPiece

Packed = Iterator[tuple[BucketHeader, Tensor]]


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
        self._beside = Beside("update-sender")
        self._by_bucket = False  # whether tensors are digested as they are sent
        self._info: WeightInfo | None = None
        self._survey: Survey | None = None
        self._update_id = uuid.uuid4().hex
        self._digests: dict[str, int] = {}
        self._num_bytes = 0
        self._wire_bytes = 0
        self._sent: list[int] = []  # by trainer rank, where each sends
        self._num_buckets = 0
        self._changed = 0  # elements sent
        self._started = time.perf_counter()
        self.gather_seconds = 0.0
        self._transfer_seconds = 0.0
        self.digest_seconds = 0.0
        self.failure: RolloutError | None = None
        self._gave_up: str | None = None

    def meet(self, connect: Callable[[], WeightLink]) -> dict[str, Any]:
        self._connect = connect
        self._link = connect()
        self._info = self._link.info()
        self._encoder = Encoder(self._options, self._info, self._base)
        transport = self._options.transport
        auto = transport == "auto" and "p2p" in self._info.transports
        look = "asked" if is_spread(transport) else "auto" if auto else ""
        if self._encoder.may_spread or is_per_rank(transport):
            look = look or "auto"
        return {"info": info_to_wire(self._info), "look": look}

    def begin(self, source: WeightSource, survey: Survey | None = None) -> dict[str, Any]:
        """Open the update on the best road and in the best encoding that the engine takes.

        Nothing of the source is read before that: what fails here is tried in the next best way.
        ``survey``: what trainer ranks hold, where that was looked into.
        """
        assert self._info is not None
        assert self._encoder is not None
        try:
            metadata = source.metadata()
        except RolloutError:
            raise
        except Exception as error:  # the trainer's own code
            raise source_failed(error, "") from error
        self._survey = survey
        self._spread_changes(survey)
        asked = is_spread(self._options.transport)
        if survey is None or (self._encoder.encoding == "delta" and not asked):
            ways = list(roads(self._options.transport, self._info))  # changes need no p2p
        else:
            ways = list(roads(self._options.transport, self._info, survey.problem, survey.split))
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
            if is_spread(options.transport):
                self._encoder.send_whole("boxes go straight from rank to rank")
            else:
                self._encoder.fall_back("boxes go straight from rank to rank")
        buffers = sender.buffers(options.bucket_bytes)
        lanes = 1 if survey is not None else self._lanes(sender)
        channel = self._channel = self._link.open()
        request = UpdateRequest(
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
            senders=lanes if survey is None else len(survey.have),
            layout="" if survey is None else self._plans.layout,
            grace=getattr(sender, "grace", 0.0),
        )
        begun = channel.begin(request)
        if survey is not None:
            # Every trainer rank connects, after it has been told where.
            where = sender.rendezvous()
            assert where is not None
            wants = self._plans.wants_for(begun, survey)
            return {"p2p": {"where": rendezvous_to_wire(where), **wants}, **self._changes()}
        sender.connect(channel, timeout)
        self._beside = Beside("update-sender")
        self._packer = BucketPacker(
            min([options.bucket_bytes, *(buffer.numel() for buffer in buffers)]),
            device=self._wire_device(),
            wait_free=self._wait_free,
            buffers=buffers,
        )
        told = {"version": begun.version, **self._changes()}
        if lanes > 1:
            wire = request_to_wire(replace(request, metadata=None))
            told["lanes"] = {"request": wire, "secret": getattr(channel, "secret", "")}
        return told

    def _lanes(self, sender: Sender) -> int:
        """How many streams will carry the update: one of each trainer rank that can read its part.

        The first rank compares for all where it keeps the copies.
        """
        assert self._encoder is not None
        found, encoder = self._survey, self._encoder
        if sender.name != "grpc_stream" or not getattr(sender, "grace", 0.0):
            return 1
        alone = found is None or found.problem is not None or encoder.keeps_all
        return 1 if found is None or alone or not hasattr(self._link, "join") else len(found.have)

    def _spread_changes(self, survey: Survey | None) -> None:
        """Let every trainer rank compare its own part, where all of them can read theirs."""
        assert self._encoder is not None
        assert self._info is not None
        if not self._encoder.may_spread or survey is None or survey.problem is not None:
            return
        layout = shard_layout(survey.layout, self._options.bucket_bytes)
        live = [self._info.epoch, self._info.version, layout]
        agreed = all(list(mark[:3]) == live for mark in survey.copies)
        self._encoder.spread_over(agreed, survey.copies[0][3])

    def _changes(self) -> dict[str, Any]:
        """What the trainer ranks have to know of the encoding."""
        assert self._encoder is not None
        encoder = self._encoder
        spread = "" if not encoder.spread else "send" if encoder.encoding == "delta" else "keep"
        return {"changes": spread, "compress": encoder.compress}

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
            self._taken(header.index - 1)

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

    def room(self, dtype: torch.dtype, shape: Shape) -> Tensor | None:
        """Where the next tensor may be gathered to; an error is kept for the next vote."""
        if self.failure is not None or self._packer is None or self._encoder is None:
            return None
        if self._encoder.encoding == "delta":
            return None  # of it the changes alone will be packed
        started = time.perf_counter()
        try:
            for header, payload in self._packer.begin(prod(shape) * dtype.itemsize):
                self._later(partial(self._ship, header, payload))
            return self._packer.room(dtype, shape)
        except Exception as error:  # noqa: BLE001 - as in ``_attempt``
            self._fail(error, "a bucket")
            return None
        finally:
            self.gather_seconds -= time.perf_counter() - started  # it waits inside a gather

    def add(self, name: str, tensor: Tensor) -> None:
        """Pack one tensor and have full buckets sent; an error is kept for the next vote.

        Digests are taken and buckets announced, sent and waited for on a thread beside this one,
        while the next bucket is gathered.
        """
        self._attempt(name, lambda packer: self._packed(packer, name, tensor))

    def add_part(self, name: str, part: CodedDelta | TensorPiece) -> None:
        """Pack and send what a trainer rank has coded of its part; an error is kept likewise."""
        self._attempt(name, lambda packer: packer.add_part(name, part))

    def sent(self) -> list[int]:
        """Buckets, bytes and elements that this rank has sent so far."""
        return [self._num_buckets, self._wire_bytes, self._changed]

    def end_parts(
        self,
        metadata: Sequence[TensorMeta],
        digests: Mapping[str, int],
        sent: Sequence[Sequence[int]],
    ) -> None:
        """Every part has arrived; ``sent``: of each rank that had a stream of its own."""
        self._digests = dict(digests)
        self._num_bytes = sum(meta.nbytes for meta in metadata)
        totals = zip(*sent, strict=True)
        self._num_buckets, self._wire_bytes, self._changed = (sum(column) for column in totals)
        self._sent = [row[1] for row in sent] if len(sent) > 1 else []

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
        assert self._encoder is not None
        assert self._info is not None
        tensor = tensor.detach()
        if tensor.is_floating_point() and tensor.dtype != self._info.dtype:
            tensor = tensor.to(self._info.dtype)
        self._by_bucket = self._encoder.encoding == "full"
        if not self._by_bucket:  # of the whole tensor, which may not travel
            self._digest(name, tensor, tuple(tensor.shape), Box.full(tuple(tensor.shape)))
        self._num_bytes += tensor.nbytes
        delta = self._encoder.delta(name, tensor, packer.bucket_bytes)
        return packer.add(name, tensor) if delta is None else packer.add_delta(name, delta)

    def flush(self) -> None:
        """Send what is left and wait until every rank has taken every bucket."""
        if self.failure is not None:
            return
        try:
            for header, payload in self._packer.flush() if self._packer is not None else ():
                self._later(partial(self._ship, header, payload))
            self._beside.wait()
            for index in range(max(0, self._num_buckets - 2), self._num_buckets):
                self._taken(index)
        except Exception as error:  # noqa: BLE001 - as in ``_attempt``
            self._fail(error, "the last buckets")

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
            assert self._connect is not None
            receipt = receipt_of(self._connect, self._update_id, error, 5 * self._options.timeout)
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
        self._beside.close()
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
        self._changed += sum(e.count if e.sparse else e.box.numel for e in header.entries)
        self._wire_bytes += header.nbytes
        self._transfer_seconds += time.perf_counter() - started

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
        for entry in header.entries if self._by_bucket else ():
            values = payload[entry.offset : entry.offset + entry.nbytes].view(entry.dtype)
            self._digest(entry.name, values.view(entry.box.shape), entry.shape, entry.box)
        self._send(header, payload)

    def _digest(self, name: str, values: Tensor, shape: Shape, box: Box) -> None:
        """Add the digest of a box to its tensor's."""
        started = time.perf_counter()
        self._digests[name] = total([self._digests.get(name, 0), digest(values, shape, box)])
        self.digest_seconds += time.perf_counter() - started

    def _wait_free(self, index: int) -> None:
        """Until a bucket's buffer may be packed again."""
        self._later(partial(self._taken, index))
        self._beside.wait()

    def _taken(self, index: int) -> None:
        assert self._channel is not None
        assert self._sender is not None
        started = time.perf_counter()
        self._sender.wait(self._channel, index, self._options.timeout)
        self._transfer_seconds += time.perf_counter() - started

    def _details(self) -> dict[str, str]:
        """What the receipt says about how it went."""
        assert self._encoder is not None
        assert self._road is not None
        sent = {"sent_bytes": ",".join(map(str, self._sent))} if self._sent else {}
        if self._encoder.encoding == "delta":
            sent["sent_elements"] = str(self._changed)
        return {
            **sent,
            "digest_seconds": f"{self.digest_seconds:.6f}",
            "transport_reason": self._road.reason,
            "encoding": self._encoder.encoding + ("-zstd" if self._encoder.compressed else ""),
            "encoding_reason": self._encoder.reason,
        }


def source_failed(error: Exception, last: str) -> SourceFailed:
    """An exception of the trainer's own code, after tensor ``last``, as one of the tree."""
    after = f" after {last!r}" if last else ""
    failed = SourceFailed(f"the source raised{after}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed
