"""One update between trainer and engine: meet, agree on how, seal and commit."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineClosed,
    RequestAborted,
    RolloutError,
    TransferFailed,
    VersionConflict,
)
from rollout.weight_sync.protocol.codec import (
    info_to_wire,
    receipt_to_wire,
    request_to_wire,
)
from rollout.weight_sync.protocol.delta import DeltaBase
from rollout.weight_sync.protocol.link import WeightLink, receipt_of
from rollout.weight_sync.protocol.messages import (
    Seal,
    UpdateRequest,
    WeightChannel,
    WeightInfo,
)
from rollout.weight_sync.trainer.bucket_sender import Books, Shipment
from rollout.weight_sync.trainer.encoder import Encoder
from rollout.weight_sync.trainer.lockstep import source_failed
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.sources.base import WeightSource
from rollout.weight_sync.trainer.survey import PlanCache, Survey, shard_layout
from rollout.weight_sync.transports import Way, asked, ways
from rollout.weight_sync.transports.base import Opening, Sender, Transport
from rollout.weights import TensorMeta

# What the digests of a receipt are of.
OWN = "each trainer rank's own boxes, taken where they lie"
PACKED = "the tensors as the sender packed them"


class Publication:
    """The sender's open update; on the other ranks it stays unopened, but for its books.

    ``shipment``: what the sender sends, once the update is open; None on the other ranks.
    """

    def __init__(
        self, options: UpdateOptions, base: DeltaBase | None, plans: PlanCache | None = None
    ) -> None:
        self._options, self._base = options, base
        self._plans = plans if plans is not None else PlanCache()
        self._encoder: Encoder | None = None
        self._way: Way | None = None
        self._link: WeightLink | None = None
        self._connect: Callable[[], WeightLink] | None = None
        self._channel: WeightChannel | None = None
        self._sender: Sender | None = None
        self._info: WeightInfo | None = None
        self._survey: Survey | None = None
        self._update_id = uuid.uuid4().hex
        self.books = Books()
        self.shipment: Shipment | None = None

    @property
    def failure(self) -> RolloutError | None:
        """What the next vote is to hear of the sender's buckets."""
        return None if self.shipment is None else self.shipment.failure

    def meet(self, connect: Callable[[], WeightLink]) -> dict[str, Any]:
        self._connect = connect
        self._link = connect()
        self._info = self._link.info()
        self._encoder = Encoder(self._options, self._info, self._base)
        chosen = asked(self._options.transport, self._info)
        look = chosen is not None and chosen.senders == "all"
        return {"info": info_to_wire(self._info), "look": look}

    def begin(self, source: WeightSource, survey: Survey | None = None) -> dict[str, Any]:
        """Open the update on the best transport and in the best encoding that the engine takes.

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
        chosen = asked(self._options.transport, self._info)
        boxes = chosen is not None and chosen.senders == "all"
        # Changes are spread over the trainer's ranks by themselves.
        holding = survey if boxes or self._encoder.encoding == "full" else None
        left = list(ways(self._options.transport, self._info, holding))
        while True:
            try:
                return self._open(left[0], metadata)
            except (VersionConflict, EngineBroken) as error:
                self._give_back()
                if self._encoder.encoding == "full":
                    raise
                self._encoder.fall_back(f"the engine refused a delta: {error}")
            except (TransferFailed, ConfigError, DeadlineExceeded) as error:
                self._give_back()
                if len(left) == 1:
                    raise
                del left[0]
                left[0] = Way(left[0].transport, f"{left[0].reason}: {error}")

    def _open(self, way: Way, metadata: tuple[TensorMeta, ...] | None) -> dict[str, Any]:
        assert self._link is not None
        assert self._info is not None
        assert self._encoder is not None
        options, timeout = self._options, self._options.timeout
        self._update_id = uuid.uuid4().hex
        self._way, transport = way, way.transport
        survey = self._survey if transport.senders == "all" else None
        if survey is not None:
            if options.transport == "auto":
                self._encoder.fall_back("boxes go straight from rank to rank")
            else:
                self._encoder.send_whole(
                    f"{transport.name} carries whole boxes, straight from rank to rank: changes "
                    "need another transport"
                )
        streams = 1 if survey is not None else self._streams(transport)
        opening = Opening(
            info=self._info,
            timeout=timeout,
            bucket_bytes=options.bucket_bytes,
            host=self._link.local_address,
            senders=streams if survey is None else len(survey.have),
            known="" if survey is None else self._plans.layout,
        )
        sender = self._sender = transport.open(opening)
        channel = self._channel = self._link.open()
        request = UpdateRequest(
            update_id=self._update_id,
            version=options.version,
            base=self._encoder.base,
            encoding=self._encoder.encoding,
            metadata=metadata,
            partial=options.partial,
            transport=transport.name,
            offer=sender.offer,
            bucket_bytes=options.bucket_bytes,
            staging=options.staging,
            in_flight=options.in_flight,
            label=options.label,
            timeout=timeout,
        )
        begun = channel.begin(request)
        attested = self._survey is not None and self._survey.divided
        self.shipment = Shipment(
            channel,
            sender,
            self._encoder,
            self.books,
            dtype=self._info.dtype,
            timeout=timeout,
            digests=not attested,
        )
        if survey is not None:
            # Every trainer rank connects, after it has been told where.
            wants = self._plans.wants_for(begun, survey)
            return {"rounds": {"offer": dict(sender.offer), **wants}, **self._changes()}
        self.shipment.connect()
        self.shipment.pack(options.bucket_bytes)
        told = {"version": begun.version, "attested": attested, **self._changes()}
        if streams > 1:
            wire = request_to_wire(replace(request, metadata=None))
            told["lanes"] = {"request": wire, "secret": getattr(channel, "secret", "")}
        return told

    def _streams(self, transport: Transport) -> int:
        """How many streams will carry the update: one of each trainer rank that can read its part.

        The first rank compares for all where it keeps the copies.
        """
        assert self._encoder is not None
        found, encoder = self._survey, self._encoder
        assert self._link is not None
        alone = found is None or found.problem is not None or encoder.keeps_all
        if found is None or alone or not transport.streams or not self._link.joins:
            return 1
        return len(found.have)

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

    def _give_back(self) -> None:
        """Let go of an attempt that failed before anything was sent."""
        self.close()
        self._sender = self._channel = self.shipment = None

    def finish(self) -> dict[str, Any]:
        """Seal and commit."""
        assert self._channel is not None
        assert self._sender is not None
        assert self._encoder is not None
        books = self.books
        self._sender.close()
        if isinstance(self._options.transport, Transport):
            self._options.transport.check_sent(self._sender)
        self._channel.seal(
            Seal(
                num_buckets=books.num_buckets,
                digests=books.digests,
                gather_seconds=books.gather_seconds,
                transfer_seconds=books.transfer_seconds,
                wire_bytes=books.wire_bytes,
                details=self._details(),
            )
        )
        try:
            receipt = self._channel.commit()
        except (DeadlineExceeded, EngineClosed, RequestAborted, TransferFailed) as error:
            assert self._connect is not None
            receipt = receipt_of(self._connect, self._update_id, error, 5 * self._options.timeout)
        self._encoder.settle(receipt.epoch, receipt.version, books.wire_bytes, books.num_bytes)
        return {"receipt": receipt_to_wire(receipt)}

    def gathered(self, tensor: Tensor) -> Tensor:
        """On the sender: what the source has yielded, as it is to be packed."""
        assert self._sender is not None
        return self._sender.gathered(tensor)

    def give_up(self, reason: str) -> None:
        """From the watchdog's thread: free the engine's side; this side is in a collective."""
        shipment = self.shipment
        if shipment is not None:
            shipment.give_up(reason)

    def close(self) -> None:
        """Abort what did not commit, and let go of the sender and the channel."""
        for part in (self.shipment, self._sender, self._channel):
            if part is not None:
                part.close()

    def _details(self) -> dict[str, str]:
        """What the receipt says about how it went."""
        assert self._encoder is not None
        assert self._way is not None
        books = self.books
        sent = {"sent_bytes": ",".join(map(str, books.sent))} if books.sent else {}
        if self._encoder.encoding == "delta":
            sent["sent_elements"] = str(books.changed)
        return {
            **sent,
            "digests": OWN if books.of_own_boxes else PACKED,
            "digest_seconds": f"{books.digest_seconds:.6f}",
            "transport_reason": self._way.reason,
            "encoding": self._encoder.encoding + ("-zstd" if self._encoder.compressed else ""),
            "encoding_reason": self._encoder.reason,
        }
