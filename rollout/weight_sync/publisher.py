"""The trainer's side of an update: gather, pack, send, seal, commit; all ranks or none.

Collective over the source's ranks. Rank 0 of them (the sender) alone talks to the engine; the
others take part in the gathers, in one continue/abort vote per bucket's worth of bytes, and get
the same receipt or the same error.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from torch import Tensor

from rollout.config import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineClosed,
    RolloutError,
    SourceFailed,
    TransferFailed,
    from_wire,
    to_wire,
)
from rollout.kernels import digest
from rollout.update_wire import (
    info_from_wire,
    info_to_wire,
    receipt_from_wire,
    receipt_to_wire,
)
from rollout.updates import IN_FLIGHT, BucketHeader, Seal, UpdateRequest, WeightChannel, WeightInfo
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.bucket import BucketPacker
from rollout.weight_sync.digests import total
from rollout.weight_sync.source import WeightSource, agreement_for, source_for
from rollout.weight_sync.transports import Sender, SenderFactory, make_sender
from rollout.weight_sync.watchdog import Watchdog
from rollout.weights import Box, UpdateReceipt


class WeightLink(Protocol):
    """How a trainer reaches an engine: in process, or ``RolloutClient``."""

    def info(self) -> WeightInfo: ...

    def open(self) -> WeightChannel: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateOptions:
    """The keywords of ``Rollout.update_weights``; sizes in bytes, times in seconds."""

    version: int | None = None
    transport: str | SenderFactory = "auto"
    encoding: str = "auto"
    staging: str = "auto"
    in_flight: str = "keep"
    bucket_bytes: int = DEFAULT_BUCKET_BYTES
    timeout: float = DEFAULT_TIMEOUT
    label: str | None = None
    partial: bool = False

    def __post_init__(self) -> None:
        if self.encoding not in ("auto", "full"):
            raise ConfigError(f"encoding must be auto or full, got {self.encoding!r}")
        if self.staging not in ("auto", "device", "none"):
            raise ConfigError(f"staging must be auto, device or none, got {self.staging!r}")
        if self.in_flight not in IN_FLIGHT:
            raise ConfigError(
                f"in_flight must be one of {', '.join(IN_FLIGHT)}, got {self.in_flight!r}"
            )
        if self.bucket_bytes < 1:
            raise ConfigError(f"bucket_bytes must be positive, got {self.bucket_bytes}")
        if not self.timeout > 0:
            raise ConfigError(f"timeout must be a positive number of seconds, got {self.timeout}")


def publish(
    obj: Any, *, connect: Callable[[], WeightLink], options: UpdateOptions
) -> UpdateReceipt:
    """Make the weights of ``obj`` live on the engine as one version, or change nothing.

    ``obj`` is whatever ``source_for`` accepts. Every rank of a distributed source calls this in
    the same order; only the sender calls ``connect``. Returns the same receipt on every rank;
    raises the same error of the tree on every rank that is still alive.
    """
    timeout = options.timeout
    agreement = agreement_for(obj, timeout=timeout)
    with closing(agreement), closing(_Publication(options)) as sending:
        told = _on_sender(agreement, timeout, "info", lambda: sending.meet(connect))
        info = info_from_wire(told["info"])
        source, failure = _source(obj, info, agreement, timeout)
        agreement.vote(failure, timeout, "source")
        assert source is not None
        _on_sender(agreement, timeout, "begin", lambda: sending.begin(source))
        _stream(source, info, agreement, options, sending)
        told = _on_sender(agreement, 4 * timeout, "commit", sending.finish)
        return receipt_from_wire(told["receipt"])


def _source(
    obj: Any, info: WeightInfo, agreement: Agreement, timeout: float
) -> tuple[WeightSource | None, Exception | None]:
    try:
        return (
            source_for(
                obj, aliases=info.aliases, dtype=info.dtype, agreement=agreement, timeout=timeout
            ),
            None,
        )
    except RolloutError as error:
        return None, error


def _on_sender(
    agreement: Agreement, timeout: float, phase: str, act: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What ``act`` returned on the sender, on every rank; its error is raised on every rank."""
    said: dict[str, Any] | None = None
    failure: RolloutError | None = None
    if agreement.is_sender:
        try:
            said = act()
        except RolloutError as error:
            failure, said = error, {"error": to_wire(error)}
    if agreement.size > 1:
        # The sender's own wait is bounded by ``timeout``; the others allow for it to say so.
        said = agreement.broadcast(said, 2 * timeout, phase)
    assert said is not None
    if failure is not None:
        raise failure
    if "error" in said:
        raise from_wire(said["error"])
    return said


def _stream(
    source: WeightSource,
    info: WeightInfo,
    agreement: Agreement,
    options: UpdateOptions,
    sending: _Publication,
) -> None:
    """Iterate the source in lockstep, sending on the sender, voting once per bucket's worth."""
    sizes = {meta.name: meta.nbytes for meta in info.tensors}
    items = iter(source)
    since_vote, last = 0, ""
    error: Exception | None = None
    with Watchdog(options.timeout, sending.give_up) as watchdog:
        try:
            while True:
                started = time.perf_counter()
                watchdog.arm(f"trainer rank {agreement.ranks[agreement.rank]}", "gather", last)
                try:
                    item = next(items, None)
                except RolloutError as failure:
                    error, item = failure, None
                except Exception as failure:  # noqa: BLE001 - whatever the trainer's code raises
                    error, item = _source_failed(failure, last), None
                finally:
                    watchdog.disarm()
                sending.gather_seconds += time.perf_counter() - started
                if item is None:
                    break
                last = item[0]
                if agreement.is_sender:
                    sending.add(*item)
                since_vote += sizes.get(last, 0)
                if since_vote >= options.bucket_bytes or sending.failure is not None:
                    since_vote = _vote(agreement, sending, since_vote, options)
            if agreement.is_sender and error is None:
                sending.flush()
            agreement.vote(error or sending.failure, options.timeout, f"end, after {last!r}")
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()


def _vote(
    agreement: Agreement, sending: _Publication, since_vote: int, options: UpdateOptions
) -> int:
    """One continue/abort flag of all ranks; the count since the last vote is returned.

    A sender that failed between votes goes on gathering until the next one: it must not leave the
    others alone in a collective.
    """
    if agreement.size > 1 and since_vote < options.bucket_bytes:
        return since_vote
    agreement.vote(sending.failure, options.timeout, "bucket")
    return 0


def _source_failed(error: Exception, last: str) -> SourceFailed:
    after = f" after {last!r}" if last else ""
    failed = SourceFailed(f"the source raised{after}: {type(error).__name__}: {error}")
    failed.__cause__ = error
    return failed


class _Publication:
    """The sender's open update; on the other ranks it stays unopened."""

    def __init__(self, options: UpdateOptions) -> None:
        self._options = options
        self._link: WeightLink | None = None
        self._connect: Callable[[], WeightLink] | None = None
        self._channel: WeightChannel | None = None
        self._sender: Sender | None = None
        self._packer: BucketPacker | None = None
        self._info: WeightInfo | None = None
        self._update_id = uuid.uuid4().hex
        self._digests: dict[str, int] = {}
        self._num_bytes = 0
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
        return {"info": info_to_wire(self._info)}

    def begin(self, source: WeightSource) -> dict[str, Any]:
        assert self._link is not None
        assert self._info is not None
        options, timeout = self._options, self._options.timeout
        self._sender = make_sender(options.transport, self._info, timeout)
        self._channel = self._link.open()
        metadata = source.metadata()
        begun = self._channel.begin(
            UpdateRequest(
                update_id=self._update_id,
                version=options.version,
                encoding="full",
                metadata=metadata,
                partial=options.partial,
                transport=self._sender.name,
                rendezvous=self._sender.rendezvous(),
                bucket_bytes=options.bucket_bytes,
                staging=options.staging,
                in_flight=options.in_flight,
                label=options.label,
                timeout=timeout,
            )
        )
        self._sender.connect(timeout)
        self._packer = BucketPacker(
            options.bucket_bytes, device=self._wire_device(), wait_free=self._wait_free
        )
        return {"version": begun.version}

    def _wire_device(self) -> str:
        assert self._info is not None
        assert self._sender is not None
        nccl = self._sender.rendezvous()
        return "cuda" if nccl is not None and nccl.backend == "nccl" else "cpu"

    def add(self, name: str, tensor: Tensor) -> None:
        """Digest, pack and send one tensor; an error is kept for the next vote."""
        if self.failure is not None:
            return
        assert self._packer is not None
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
            for header, payload in self._packer.add(name, tensor):
                self._send(header, payload)
        except RolloutError as error:
            self.failure = error
        except RuntimeError as error:
            self.failure = TransferFailed(f"sending {name!r} failed: {error}")

    def flush(self) -> None:
        """Send what is left and wait until every rank has taken every bucket."""
        if self.failure is not None:
            return
        assert self._packer is not None
        try:
            for header, payload in self._packer.flush():
                self._send(header, payload)
            for index in range(max(0, self._num_buckets - 2), self._num_buckets):
                self._wait_free(index)
        except RolloutError as error:
            self.failure = error

    def finish(self) -> dict[str, Any]:
        """Seal and commit."""
        assert self._channel is not None
        assert self._sender is not None
        self._sender.close()
        self._channel.seal(
            Seal(
                num_buckets=self._num_buckets,
                digests=self._digests,
                gather_seconds=self.gather_seconds,
                transfer_seconds=self._transfer_seconds,
                wire_bytes=self._num_bytes,
                details={"digest_seconds": f"{self._digest_seconds:.6f}"},
            )
        )
        try:
            receipt = self._channel.commit()
        except (DeadlineExceeded, EngineClosed, TransferFailed) as error:
            receipt = self._committed_after_all(error)
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
        for part in (self._sender, self._channel):
            if part is not None:
                part.close()

    def _send(self, header: BucketHeader, payload: Tensor) -> None:
        assert self._channel is not None
        assert self._sender is not None
        started = time.perf_counter()
        self._sender.send(self._channel, header, payload)
        self._num_buckets = header.index + 1
        self._transfer_seconds += time.perf_counter() - started

    def _wait_free(self, index: int) -> None:
        assert self._channel is not None
        assert self._sender is not None
        started = time.perf_counter()
        self._sender.wait(self._channel, index, self._options.timeout)
        self._transfer_seconds += time.perf_counter() - started

    def _committed_after_all(self, lost: RolloutError) -> UpdateReceipt:
        """A reply may be lost after the commit: the engine says whether this update is live."""
        assert self._connect is not None
        try:
            info = self._connect().info()
        except RolloutError:
            raise lost from None
        if info.last_update_id != self._update_id:
            raise lost
        assert self._sender is not None
        return UpdateReceipt(
            version=info.version,
            epoch=info.epoch,
            digest=total(v for name, v in self._digests.items() if name not in info.aliases),
            num_tensors=sum(name not in info.aliases for name in self._digests),
            num_bytes=self._num_bytes,
            wire_bytes=self._num_bytes,
            timings={"gather": self.gather_seconds, "transfer": self._transfer_seconds},
            ranks=(),
            update_id=self._update_id,
            transport=self._sender.name,
            label=self._options.label,
            details={"recovered": "the commit's reply was lost; the engine confirmed it"},
        )
