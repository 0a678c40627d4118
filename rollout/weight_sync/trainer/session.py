"""An open update: how it is carried out, as the first rank decides, and that rank's part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from rollout.distributed import is_loopback
from rollout.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineBroken,
    EngineClosed,
    RequestAborted,
    RolloutError,
    TransferFailed,
    VersionConflict,
    WeightError,
)
from rollout.weight_sync.protocol.channel import WeightChannel
from rollout.weight_sync.protocol.link import WeightLink, receipt_of
from rollout.weight_sync.protocol.messages import Begun, Seal, UpdateRequest, WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.bucket_sender import BucketSender
from rollout.weight_sync.trainer.encoder import Encoding
from rollout.weight_sync.trainer.lockstep import source_failed
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.shard_layout import TRY_AGAIN, PlanCache, ShardLayout
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.trainer.sources.names import wire_dtype
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.transports import Way, asked, mapping, ways
from rollout.weight_sync.transports.base import Opening, Sender, Transport
from rollout.weight_sync.transports.cuda_reshard import relays
from rollout.weights import CASTABLE, TensorMeta
from rollout.wire.codec import to_plain
from rollout.wire.version import PROTOCOL

log = logging.getLogger(__name__)
_CONNECT = ("boxes", "resharded", "shared")  # ``pieces`` for which every trainer rank connects


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatePlan:
    """What every trainer rank has to know about an open update.

    ``pieces``: "gathered": whole tensors come to the first rank; "shards": each rank sends what it
    holds; "boxes": each sends it straight to the engine ranks that want it; "resharded": to the
    trainer ranks that lend it to those; "shared": each writes it to memory that the engine's ranks
    map; "mapped": these map what each holds. ``bucket_bytes``:
    the first rank's, by which all cut and vote. ``own_digests``: each rank digests what it holds,
    instead of the first one what was gathered. ``join``: how a rank opens a stream of its own, if
    it has one. ``meet``: where ranks meet for boxes, and which boxes go where; or the memory that
    they write buckets to together, at most ``longest`` bytes; or what ``Sender.lend`` said.
    """

    pieces: str
    encoding: Encoding
    bucket_bytes: int
    own_digests: bool = False
    join: Mapping[str, Any] | None = None
    meet: Mapping[str, Any] | None = None

    @property
    def each_sends(self) -> bool:
        """Whether every rank sends bytes, not only the first one."""
        return self.join is not None or self.meet is not None

    @property
    def needs_shards(self) -> bool:
        """Whether ranks read their own shards, to send, digest or keep them."""
        digests = self.pieces == "gathered" and self.own_digests
        return self.pieces == "shards" or digests or self.encoding.keeps == "each"

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> UpdatePlan:
        return cls(**{**wire, "encoding": Encoding(**wire["encoding"])})


@dataclass(frozen=True, slots=True)
class UpdateSession:
    """An open update on the first rank, the only one that talks to the engine."""

    plan: UpdatePlan
    request: UpdateRequest
    way: Way
    channel: WeightChannel
    sender: Sender
    buckets: BucketSender
    stats: TransferStats
    options: UpdateOptions
    connect: Callable[[], WeightLink]
    merged: tuple[str, ...] = ()  # adapters, by PEFT's names

    def gathered(self, piece: Piece) -> Piece:
        """A piece of the source, as it is to be packed."""
        values = self.sender.gathered(piece.values)
        return piece if values is piece.values else replace(piece, values=values)

    def commit(self, digests: Mapping[str, int], sent: list[int]) -> UpdateReceipt:
        """Seal and commit. ``sent``: bytes by trainer rank, if each sends."""
        self.sender.close()
        if isinstance(self.options.transport, Transport):
            self.options.transport.check_sent(self.sender)
        stats = self.stats
        self.channel.seal(
            Seal(
                num_buckets=stats.num_buckets,
                digests=digests,
                gather_seconds=stats.gather_seconds,
                transfer_seconds=stats.transfer_seconds,
                wire_bytes=stats.wire_bytes,
                details=self._details(sent),
            )
        )
        try:
            return self.channel.commit()
        except (DeadlineExceeded, EngineClosed, RequestAborted, TransferFailed) as error:
            wait = 5 * self.options.timeout
            return receipt_of(self.connect, self.request.update_id, error, wait)

    def __enter__(self) -> UpdateSession:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """Tell the engine what went wrong here or on another trainer rank."""
        if error is not None:
            self.channel.abort(str(error) or type(error).__name__)
        self.close()

    def close(self) -> None:
        """Abort if it has not committed, and release the sender and the channel."""
        # Ranks that read the sender's memory stop when the channel is closed; those that wait for
        # a member of their group are freed by the sender's end.
        ends = (self.sender, self.channel)
        for part in (self.buckets, *(ends[::-1] if self.sender.bytes_go == "memory" else ends)):
            part.close()

    def _details(self, sent: list[int]) -> dict[str, str]:
        """What the receipt says about how it went."""
        stats, encoding = self.stats, self.plan.encoding
        details = {"sent_bytes": ",".join(map(str, sent))} if sent else {}
        if count := self.buckets.read_in_place:
            whole = self.plan.pieces != "mapped"
            boxes = "" if whole else f"boxes of {len(self.request.metadata or ())} "
            details["read_in_place"] = f"{count} {boxes}tensors"
        if self.merged:
            details["merged_adapters"] = ", ".join(self.merged)
            if self.request.merged:  # told where the engine has slots
                details["unmerged_by"] = (
                    "adapters={name: model} or adapters_only=True, into one of its max_adapters"
                )
        if self.buckets.packed_because:
            details["packed_because"] = self.buckets.packed_because
        if encoding.name == "delta":
            details["sent_elements"] = str(stats.changed)
        own = self.plan.own_digests
        return {
            **details,
            "digests": "each trainer rank's own boxes, taken where they lie"
            if own
            else "the tensors as the sender packed them",
            "digest_seconds": f"{stats.digest_seconds:.6f}",
            "transport_reason": self.way.reason,
            "encoding": encoding.title,
            "encoding_reason": encoding.reason,
        }


def by_boxes(transport: str | Transport, info: WeightInfo) -> bool:
    """Whether the caller chose a transport in which all trainer ranks send their own boxes."""
    chosen = asked(transport, info)
    return chosen is not None and chosen.senders == "all"


def meeting_host(local_address: str, boxes: ShardLayout | None) -> str:
    """This machine's address as the engine reaches it, and for boxes other trainer ranks, too.

    ``local_address``: the one seen by the engine. An engine in this process, or one reached by
    loopback, says nothing about other hosts.
    """
    if boxes is None or boxes.num_hosts == 1 or not is_loopback(local_address):
        return local_address
    return boxes.first_at


@dataclass(frozen=True, slots=True)
class Opener:
    """Opens an update on the first rank, with all that this rank knows.

    ``layout``: what trainer ranks hold, if that was exchanged.
    """

    connect: Callable[[], WeightLink]
    link: WeightLink
    info: WeightInfo
    options: UpdateOptions
    layout: ShardLayout | None
    plans: PlanCache
    stats: TransferStats

    def open(self, source: Incoming, encoding: Encoding) -> UpdateSession:
        """Open with the best transport and encoding that the engine accepts.

        Nothing of the source has been read yet, so what fails here is tried the next best way.
        """
        try:
            metadata = source.metadata()
        except RolloutError:
            raise
        except Exception as error:  # the trainer's own code
            raise source_failed(error, "") from error
        # Changes are spread over the trainer's ranks by themselves.
        boxes = encoding.name == "full" or by_boxes(self.options.transport, self.info)
        layout = self._looked_at(encoding) if boxes else None
        left = list(ways(self.options.transport, self.info, layout))
        left, late = self._without_late(left), dict[str, str]()
        while True:
            try:
                session = self._try(left[0], encoding, metadata, source, late)
            except (VersionConflict, EngineBroken) as error:
                if encoding.name == "full":
                    raise
                encoding = encoding.full(f"the engine refused a delta: {error}")
            except (TransferFailed, ConfigError, DeadlineExceeded) as error:
                if len(left) == 1:
                    raise
                failed = left.pop(0).transport
                if failed.maps and layout is not None and layout.not_mapped is None:
                    layout = replace(layout, not_mapped="")  # boxes may be sent then
                    again = ways(self.options.transport, self.info, layout)
                    left = [way for way in again if way.transport.name != failed.name]
                    left = self._without_late(left)
                left[0] = Way(left[0].transport, f"{left[0].reason}: {error}")
            else:
                self._pass_over(late, session)
                return session

    def _looked_at(self, encoding: Encoding) -> ShardLayout | None:
        """What trainer ranks hold; that it can be mapped is told where it will be."""
        layout = self.layout
        if layout is None or layout.not_mapped is not None:
            return layout
        late = (transport := mapping(self.info)) is not None and self.plans.is_late(transport.name)
        if self._all_mapped(encoding) and not late:
            return layout
        why = "copies are kept for deltas" if layout.divided else ""
        if late:
            why = "it could not be lately"
        return replace(layout, not_mapped=why)

    def _pass_over(self, late: Mapping[str, str], session: UpdateSession) -> None:
        """Have no update wait soon for a way that was not there, as behind a firewall."""
        for tried, error in late.items():
            self.plans.pass_over(tried)
            log.warning(
                "updates go by %s, and for %g s not by %s, which did not connect: %s",
                session.way.transport.name, TRY_AGAIN, tried, error,
            )  # fmt: skip

    def _without_late(self, left: list[Way]) -> list[Way]:
        """Without those that did not connect lately; the last one is never left out."""
        while len(left) > 1 and self.plans.is_late(left[0].transport.name):
            tried = left.pop(0).transport.name
            left[0] = Way(left[0].transport, f"{left[0].reason}; no {tried}: not there lately")
        return left

    def _try(
        self,
        way: Way,
        encoding: Encoding,
        metadata: tuple[TensorMeta, ...] | None,
        source: Incoming,
        late: dict[str, str],
    ) -> UpdateSession:
        """``late``: is told where the engine took part, and its ranks did not connect in time."""
        options, transport = self.options, way.transport
        by = self._boxes_by(transport, encoding)
        boxes = self.layout if by in _CONNECT else None
        if transport.senders == "all":
            encoding = self._whole(encoding, transport)
        streams = 1 if boxes is not None else self._streams(transport, encoding)
        opening = Opening(
            info=self.info,
            timeout=options.timeout,
            bucket_bytes=options.bucket_bytes,
            host=meeting_host(self.link.local_address, boxes),
            senders=streams if boxes is None else len(boxes.have),
            known="" if boxes is None else self.plans.wants_digest,
            staying=partial(self._staying, source, encoding),
            headers=self.plans.headers,
            mapped=by == "mapped",
        )
        with ExitStack() as undo:
            sender = transport.open(opening)
            undo.callback(sender.close)
            channel = self.link.open()
            undo.callback(channel.close)
            request = self._request(transport, sender, encoding, metadata, source)
            begun = channel.begin(request)
            sender.accepted(begun)
            plan = self._plan_boxes(by, encoding, sender, begun)
            if plan is None:
                if by == "mapped":
                    way = Way(transport, f"{way.reason}, but not of every GPU")
                plan = self._plan(encoding, request, channel, streams)
            buckets = self._buckets(channel, sender, plan, small=not source.models)
            undo.callback(buckets.close)
            # Elsewhere every trainer rank connects, after it has been told where.
            if plan.pieces not in _CONNECT:
                try:
                    buckets.connect()
                except DeadlineExceeded as error:
                    if sender.bytes_go == "group":  # no wall stands in the way to memory
                        late[transport.name] = str(error)
                    raise
            undo.pop_all()
        return UpdateSession(
            plan, request, way, channel, sender, buckets, self.stats, options, self.connect,
            (*source.merged, *options.merged),
        )  # fmt: skip

    def _staying(self, source: Incoming, encoding: Encoding) -> list[Tensor]:
        if self.layout is not None or encoding.name != "full" or encoding.keeps:
            return []
        with suppress(WeightError):  # sending them raises it again
            found = [tensor for _, tensor in source.at_hand() or ()]
            return found if all(x.numel() and x.dtype in CASTABLE for x in found) else []
        return []

    def _request(
        self,
        transport: Transport,
        sender: Sender,
        encoding: Encoding,
        metadata: tuple[TensorMeta, ...] | None,
        source: Incoming,
    ) -> UpdateRequest:
        options = self.options
        return UpdateRequest(
            update_id=options.sent_as or options.new_id(),
            version=options.version,
            # Copies are those of the live version, or there is no delta.
            base=(self.info.epoch, self.info.version) if encoding.name == "delta" else None,
            encoding=encoding.name,
            metadata=metadata,
            partial=options.partial,
            transport=transport.name,
            offer=sender.offer,
            bucket_bytes=options.bucket_bytes,
            staging=options.staging,
            in_flight=options.in_flight,
            pin_timeout=options.pin_timeout or 0.0,
            pin_fallback=options.pin_fallback,
            label=options.label,
            timeout=options.timeout,
            protocol=min(PROTOCOL, self.info.protocol),
            components=source.components,
            adapters=source.adapters,
            adapters_after=options.adapters_after,
            merged=self._merged(source),
            **self._limits(),
        )

    def _merged(self, source: Incoming) -> tuple[str, ...]:
        known = self.info.max_adapters and "merged" in self.info.features
        return (*source.merged, *self.options.merged) if known else ()

    def _limits(self) -> dict[str, Any]:
        given = {name: getattr(self.options, name) for name in ("max_stall", "max_extra_memory")}
        given = {name: value for name, value in given.items() if value is not None}
        if given and "limits" not in self.info.features:
            raise VersionConflict(
                f"the engine is of a version that knows no {' and no '.join(given)}: leave it out"
            )
        return given

    def _buckets(
        self, channel: WeightChannel, sender: Sender, plan: UpdatePlan, small: bool
    ) -> BucketSender:
        full = plan.encoding.name == "full"
        return BucketSender(
            channel,
            sender,
            self.stats,
            bucket_bytes=self.options.bucket_bytes,
            timeout=self.options.timeout,
            digests=full and not plan.own_digests,
            zero_copy=full and plan.pieces == "gathered",
            small=small,
            wire=lambda name, dtype: wire_dtype(name, dtype, self.info.dtype),
            headers=self.plans.headers,
        )

    def _whole(self, encoding: Encoding, transport: Transport) -> Encoding:
        """For boxes, which go straight from rank to rank."""
        if self.options.transport == "auto":
            return encoding.full("boxes go straight from rank to rank")
        return Encoding(
            name="full",
            reason=f"{transport.name} carries whole boxes, straight from rank to rank: changes "
            "need another transport",
        )

    def _boxes_by(self, transport: Transport, encoding: Encoding) -> str:
        """How trainer ranks are to bring their own boxes, as ``UpdatePlan.pieces``; "" where they
        are not.
        """
        if transport.senders == "all":
            return "resharded" if transport.exchanged else "boxes"
        if transport.shared and self._write_together(encoding):
            return "shared"
        return "mapped" if transport.maps and self._all_mapped(encoding) else ""

    def _write_together(self, encoding: Encoding) -> bool:
        """Whether all trainer ranks write their own boxes to the memory that the engine maps."""
        layout = self.layout
        if layout is None or not (layout.divided and layout.num_hosts == 1):
            return False
        # Where rows share a scale, those around each cut would wait there for their other halves.
        grid = self.info.grid
        alone = grid is None or grid.rows == 1
        return alone and encoding.name == "full" and not encoding.keeps

    def _all_mapped(self, encoding: Encoding) -> bool:
        """Whether the engine's ranks are to map what each trainer rank holds."""
        layout = self.layout
        if layout is None or not layout.divided or layout.not_mapped is not None:
            return False
        return encoding.name == "full" and encoding.keeps != "first"

    def _streams(self, transport: Transport, encoding: Encoding) -> int:
        """How many streams will carry the update: one of each trainer rank that can read its own
        boxes, unless the first rank compares for all.
        """
        layout = self.layout
        if layout is None or layout.problem is not None or encoding.keeps == "first":
            return 1
        return len(layout.have) if transport.streams and self.link.joins else 1

    def _plan_boxes(
        self, by: str, encoding: Encoding, sender: Sender, begun: Begun
    ) -> UpdatePlan | None:
        """None where trainer ranks do not bring their own boxes after all."""
        layout = self.layout
        told: Mapping[str, Any] | None = None
        if layout is not None and by in ("boxes", "resharded"):
            told = self.plans.wants_for(begun, layout)
            if by == "resharded":
                told = {**told, "relays": relays(self.info, layout)}
        elif by == "shared":
            told = {"longest": sender.buffers[0].numel()}
        elif layout is not None and by == "mapped":
            told = sender.lend(layout.gpus)
        if told is None:
            return None
        return UpdatePlan(
            pieces=by, encoding=encoding, bucket_bytes=self.options.bucket_bytes,
            own_digests=True, meet={"offer": dict(sender.offer), **told},
        )  # fmt: skip

    def _plan(
        self, encoding: Encoding, request: UpdateRequest, channel: WeightChannel, streams: int
    ) -> UpdatePlan:
        join, plan = None, partial(UpdatePlan, bucket_bytes=request.bucket_bytes)
        if streams > 1:
            wire = to_plain(replace(request, metadata=None))
            join = {"request": wire, "secret": channel.secret}
        if streams > 1 or (encoding.keeps == "each" and encoding.name == "delta"):
            return plan(pieces="shards", encoding=encoding, own_digests=True, join=join)
        own = self.layout is not None and self.layout.divided
        return plan(pieces="gathered", encoding=encoding, own_digests=own)
