"""One trainer rank's own part in an update, where it has one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from typing import Any

from rollout.errors import RolloutError
from rollout.weight_sync.protocol.delta import DeltaBase, ShardCopies
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import UpdateReceipt, WeightInfo
from rollout.weight_sync.trainer.encoder import too_dense
from rollout.weight_sync.trainer.lanes import Outlet, RankStream
from rollout.weight_sync.trainer.local_parts import Shards, ShardUpdate
from rollout.weight_sync.trainer.lockstep import Watchdog
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.session import Publication
from rollout.weight_sync.trainer.sources.base import WeightSource
from rollout.weight_sync.trainer.survey import Survey


class OwnPart:
    """What a rank sends itself, and its copies, which are gone unless the update commits."""

    def __init__(self, base: DeltaBase | None, options: UpdateOptions) -> None:
        self._base, self._options = base, options
        self._copies = base.take_shards() if base is not None else ShardCopies()

    @property
    def mark(self) -> tuple[Any, ...]:
        """What other ranks must hold, too, for a delta to be built on these copies."""
        held = self._copies
        return (held.epoch, held.version, held.layout, held.since_anchor)

    def send(
        self,
        source: WeightSource,
        found: Survey,
        info: WeightInfo,
        agreement: Agreement,
        sending: Publication,
        told: Mapping[str, Any],
        connect: Callable[[], WeightLink],
        watch: Watchdog,
    ) -> None:
        """Send this rank's part, by the first rank or on a stream of its own."""
        with ExitStack() as stack:
            outlet: Outlet | None = None
            if "lanes" in told:
                outlet, failure = self._outlet(agreement, sending, told, connect)
                if isinstance(outlet, RankStream):
                    stack.enter_context(closing(outlet))
                agreement.vote(failure, 2 * self._options.timeout, "join")
            ShardUpdate(
                Shards(source, found, agreement.rank, self._options.bucket_bytes, watch),
                self._copies if told["changes"] == "send" else None,
                info,
                agreement,
                self._options,
                sending,
                outlet,
                told["compress"],
            ).run(found.metadata)

    def _outlet(
        self,
        agreement: Agreement,
        sending: Publication,
        told: Mapping[str, Any],
        connect: Callable[[], WeightLink],
    ) -> tuple[Outlet | None, RolloutError | None]:
        if agreement.is_sender:
            return sending.shipment, None
        try:
            return RankStream(connect(), told["lanes"], agreement.rank), None
        except RolloutError as error:
            return None, error

    def settle(
        self, source: WeightSource, found: Survey, rank: int, receipt: UpdateReceipt, how: str
    ) -> None:
        """The update is live: its values are the base of the next one."""
        copies, sizes = self._copies, (receipt.wire_bytes, receipt.num_bytes)
        if self._base is None or (how == "send" and too_dense(self._options, *sizes)):
            return
        if how == "keep":
            Shards(source, found, rank, self._options.bucket_bytes).keep(copies)
        copies.since_anchor = copies.since_anchor + 1 if how == "send" else 0
        copies.epoch, copies.version = receipt.epoch, receipt.version
        self._base.put_shards(copies)
