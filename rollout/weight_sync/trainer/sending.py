"""One rank's part of an open update: pieces digested, encoded, packed and sent, then the commit."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.errors import DeadlineExceeded, RolloutError, TransferFailed
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import (
    MIN_BUCKET_BYTES,
    BucketHeader,
    UpdateRequest,
    WeightInfo,
)
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.bucket_sender import (
    IN_PLACE_BYTES,
    BucketSender,
    BucketSink,
    NoSink,
)
from rollout.weight_sync.trainer.encoder import Encoder
from rollout.weight_sync.trainer.local_shards import LocalBoxes, LocalShards
from rollout.weight_sync.trainer.lockstep import Walk
from rollout.weight_sync.trainer.mapped_shards import MappedShards
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.reshard import BoxRounds, BoxSending
from rollout.weight_sync.trainer.resharded_boxes import ReshardedBoxes
from rollout.weight_sync.trainer.session import UpdatePlan, UpdateSession
from rollout.weight_sync.trainer.shard_layout import TRY_AGAIN, PlanCache, ShardLayout
from rollout.weight_sync.trainer.shared_buckets import SharedBuckets
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.through_first import ThroughFirst
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.trainer.watchdog import Watchdog
from rollout.weight_sync.transports.cuda_ipc import MAX_HALF
from rollout.weight_sync.transports.inline import InlineSender
from rollout.weights import Shape
from rollout.wire.codec import from_plain, to_plain

log = logging.getLogger(__name__)


class Sending:
    """``layout``: what the trainer's ranks hold, if they exchanged that. ``session``: the first
    rank's; None on the others.
    """

    def __init__(
        self, group: RankGroup, source: Incoming, layout: ShardLayout | None, plan: UpdatePlan,
        session: UpdateSession | None, encoder: Encoder, stats: TransferStats,
        options: UpdateOptions,
    ) -> None:  # fmt: skip
        self._group, self._source, self._plan, self._session = group, source, plan, session
        self._encoder, self._stats, self._options = encoder, stats, options
        self._layout = layout
        self._first = None if session is None else session.buckets
        self._boxes = None if layout is None else LocalBoxes(source, layout, group.rank)
        self.shards: LocalShards | None = None  # what this rank sends, digests or keeps of those
        if self._boxes is not None and plan.needs_shards:
            self.shards = LocalShards(self._boxes, plan.bucket_bytes)

    def open_sink(self, connect: Callable[[], WeightLink], stack: ExitStack) -> BucketSink:
        """Where this rank's pieces go; collective if each rank has a stream of its own."""
        plan, timeout = self._plan, 2 * self._options.timeout
        if plan.pieces == "shards" and plan.join is None:
            return ThroughFirst(
                self._group,
                self._first,
                self._stats,
                bucket_bytes=plan.bucket_bytes,
                timeout=timeout,
            )
        sink: BucketSink = self._first or NoSink()
        if plan.join is not None:
            failure: RolloutError | None = None
            try:
                if self._first is None:
                    sink = self._join(plan.join, connect, stack)
            except RolloutError as error:
                failure = error
            self._group.vote(failure, timeout, "join")
        return sink

    def _join(
        self, join: Mapping[str, Any], connect: Callable[[], WeightLink], stack: ExitStack
    ) -> BucketSender:
        link, request = connect(), UpdateRequest.read(join["request"])
        sender = BucketSender(
            link.join(request, join["secret"], self._group.rank),
            InlineSender(),
            self._stats,
            bucket_bytes=request.bucket_bytes,
            timeout=request.timeout,
            joined=True,
        )
        stack.callback(sender.close)
        return sender

    def run(self, sink: BucketSink, plans: PlanCache, info: WeightInfo, watch: Watchdog) -> None:
        """Collective: send everything that the plan assigns to this rank."""
        if self._plan.meet is None:
            self.send_pieces(sink, watch)
            return
        assert self._layout is not None
        size = min(self._plan.bucket_bytes, self._plan.meet.get("longest", 1 << 62))
        if self._plan.pieces == "resharded":  # what the busiest relay lends at once
            size = min(size, MAX_HALF)
            size = max(MIN_BUCKET_BYTES, size // max(Counter(self._plan.meet["relays"]).values()))
        # All ranks digest their parts of one at once. Of quantised weights no more may come than an
        # engine lets wait for what shares their scales, and lies on another rank.
        if self._plan.pieces == "mapped" and not info.quantized:
            size = IN_PLACE_BYTES * self._group.size
        try:
            self.send_boxes(plans.rounds(self._layout, self._plan.meet, info, size), watch)
        except (TransferFailed, DeadlineExceeded):
            # No other way can be tried now, and memory that cannot be mapped cannot be next time.
            maps = self._plan.pieces in ("mapped", "resharded")
            if maps and self._session is not None and self._plan.pieces not in plans.proven:
                tried = self._session.way.transport.name
                plans.pass_over(tried)
                log.warning("updates go by no %s for %g s: it failed", tried, TRY_AGAIN)
            raise

    def send_pieces(self, sink: BucketSink, watch: Watchdog) -> None:
        """Collective: send every piece, with a vote after each bucket's worth of whole tensors."""
        if self._sends_at_hand():
            sink.flush()
            self._group.vote(sink.failure, self._options.timeout, "last buckets")
            return
        gathered, options = self._plan.pieces == "gathered", self._options
        if gathered and self._first is not None and self._plan.encoding.name == "full":
            self._source.place_by(partial(_buffer_for, self._first, watch))
            if not self._plan.encoding.keeps:  # a copy for deltas would have the wrong dtype
                self._source.leave(self._first.stays)
        walk = Walk(
            self._source.pieces() if gathered else self._own.pieces(),
            self._group,
            watch,
            # The first rank may itself wait for the engine's ranks until its deadline.
            timeout=options.timeout if gathered else 2 * options.timeout,
            step_bytes=self._plan.bucket_bytes,
            take=lambda piece: self._send(piece, sink, watch),
            failed=lambda: sink.failure,
            after_vote=sink.exchange,
            phase="gather" if gathered else "read",
        )
        try:
            walk.run(flush=sink.flush)
        finally:
            self._stats.gather_seconds += walk.seconds

    def _sends_at_hand(self) -> bool:
        """Whether there is nothing to gather or to pack, and all has been added at once: adapters
        that lie whole in this process, and whose ranks can read them there.
        """
        plan, first = self._plan, self._first
        whole = plan.pieces == "gathered" and not plan.own_digests and not plan.encoding.keeps
        if first is None or self._group.size > 1 or not whole or plan.encoding.name != "full":
            return False
        started = time.perf_counter()
        items = self._source.at_hand()
        added = items is not None and first.add_staying(items)
        self._stats.gather_seconds += time.perf_counter() - started
        return added

    def _send(self, piece: Piece, sink: BucketSink, watch: Watchdog) -> None:
        """Digest, encode and pack one piece; full buckets are sent."""
        plan = self._plan
        gathered = plan.pieces == "gathered"
        if not gathered and piece.last:
            with watch.over(f"read {piece.name}", piece.name):
                copies = list(self._own.copies(piece.name))
            for copy in copies:  # of ranks that have drifted apart a mixture would go live
                self._stats.digest_piece(copy)
        if gathered and plan.own_digests:
            with watch.over(f"read {piece.name}", piece.name):
                own = list(self._own.of(piece.name))
            for part in own:
                self._stats.digest_piece(part)
        if piece.values.is_meta:
            return
        if gathered and self._session is not None:
            piece = self._session.gathered(piece)
        if not gathered or (plan.encoding.name == "delta" and not plan.own_digests):
            self._stats.digest_piece(piece)  # what is full is digested by the bucket
        sink.add(piece.name, self._encoder.encode(piece, sink.bucket_bytes))

    def send_boxes(self, rounds: tuple[BucketHeader, ...], watch: Watchdog) -> None:
        """Collective: send this rank's boxes straight to the engine's ranks, round by round, or
        into memory that those share with all trainer ranks, or leave them where they lie.
        """
        assert self._boxes is not None
        assert self._plan.meet is not None
        by: Mapping[str, type[BoxRounds]] = {
            "boxes": BoxSending, "resharded": ReshardedBoxes, "shared": SharedBuckets,
            "mapped": MappedShards,
        }  # fmt: skip
        sending = by[self._plan.pieces](
            self._boxes, self._group, self._first, self._stats, self._options.timeout, watch
        )
        sending.run(rounds, self._plan.meet)

    def commit(self) -> UpdateReceipt:
        """Collective: the first rank collects digests and byte counts, seals and commits."""

        def act() -> UpdateReceipt:
            assert self._session is not None
            if not self._plan.own_digests:
                return self._session.commit(self._stats.by_tensor(), [])
            reports = self._reports()
            sent = [report["sent"][1] for report in reports] if self._plan.each_sends else []
            return self._session.commit(self._stats.add_up(reports), sent)

        if self._plan.own_digests and self._session is None:
            self._reports()
        timeout = 8 * self._options.timeout  # digests, seal, commit, and asking how it went

        def read(said: dict[str, Any]) -> UpdateReceipt:
            return from_plain(UpdateReceipt, said)

        receipt: UpdateReceipt = self._group.first_does(
            act, timeout, "commit", to_plain, read, lasting=True
        )
        return receipt

    def _reports(self) -> list[dict[str, Any]]:
        return self._group.collect_rows(self._stats.report(), 2 * self._options.timeout, "digests")

    @property
    def _own(self) -> LocalShards:
        assert self.shards is not None, "the plan says that they are needed"
        return self.shards


def _buffer_for(
    buckets: BucketSender, watch: Watchdog, dtype: torch.dtype, shape: Shape
) -> Tensor | None:
    """Asked for within a gather; it is the engine that a bucket to gather to is waited for."""
    with watch.apart():
        return buckets.buffer_for(dtype, shape)
