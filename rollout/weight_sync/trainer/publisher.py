"""The trainer's side of an update, from the first call to the receipt; all ranks or none.

Collective over the source's ranks. The first of them alone opens, seals and commits the update;
the others take part in the gathers or send what they hold, vote after each bucket's worth of bytes,
and get the same receipt or the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from rollout.weight_sync.protocol.delta import Committed, DeltaBase
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import UpdateReceipt, WeightInfo
from rollout.weight_sync.trainer.encoder import Encoder, choose_encoding
from rollout.weight_sync.trainer.lockstep import agreed_source, watchdog
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sending import Sending
from rollout.weight_sync.trainer.session import Opener, UpdatePlan, UpdateSession, by_boxes
from rollout.weight_sync.trainer.shard_layout import PlanCache, exchange_layout
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.wire.codec import from_plain, to_plain

log = logging.getLogger(__name__)

__all__ = ["UpdateOptions", "WeightLink", "publish"]


def publish(
    obj: Any,
    *,
    connect: Callable[[], WeightLink],
    options: UpdateOptions,
    base: DeltaBase | None = None,
    plans: PlanCache | None = None,
) -> UpdateReceipt:
    """Make the weights of ``obj`` live on the engine as one version, or change nothing.

    ``obj`` is whatever ``detect`` accepts. Every rank of a distributed source calls this in the
    same order; the first one calls ``connect``, and so do the others where each has a stream of its
    own. ``base`` holds what this rank last committed to the same engine, which a delta is built on
    (None: every update is full). ``plans`` remembers between updates, on every rank, what goes
    where. Returns the same receipt on every rank; raises the same error of the tree on every rank
    that is still alive.
    """
    timeout, stats = options.timeout, TransferStats()
    plans = plans if plans is not None else PlanCache()
    found = detect(obj)
    if not plans.told_alone and (alone := found.calls_alone()) is not None:
        plans.told_alone = True
        log.warning("%s", alone)
    with ExitStack() as stack:
        group = stack.enter_context(closing(found.rank_group(timeout)))
        info, link = _reach(group, connect, timeout)
        source = agreed_source(found, info, group, timeout, partial=options.partial)
        copies = base.take() if base is not None else Committed()
        layout = None
        if group.size > 1 or by_boxes(options.transport, info):
            layout = exchange_layout(source, group, timeout, plans, copies)

        def open_update() -> tuple[UpdatePlan, UpdateSession | None]:
            assert link is not None
            encoding = choose_encoding(options, info, base, copies, layout)
            opener = Opener(connect, link, info, options, layout, plans, stats)
            session = opener.open(source, encoding)
            stack.callback(session.close)
            return session.plan, session

        plan, session = group.first_does(
            open_update,
            2 * timeout,
            "begin",
            lambda opened: opened[0].to_wire(),
            lambda said: (UpdatePlan.from_wire(said), None),
        )
        encoder = Encoder(options, info, base, copies, plan.encoding, is_first=group.is_sender)
        sending = Sending(group, source, layout, plan, session, encoder, stats, options)
        sink = sending.open_sink(connect, stack)
        with watchdog(group, timeout, sink.give_up) as watch:
            if plan.meet is None:
                sending.send_pieces(sink, watch)
            else:
                assert layout is not None
                sending.send_boxes(
                    plans.rounds(layout, plan.meet, info, options.bucket_bytes), watch
                )
        receipt = sending.commit()
        encoder.settle(receipt, sending.shards)
        return receipt


def _reach(
    group: RankGroup, connect: Callable[[], WeightLink], timeout: float
) -> tuple[WeightInfo, WeightLink | None]:
    """What the engine announces; and the way to it, on the first rank."""

    def reach() -> tuple[WeightInfo, WeightLink | None]:
        link = connect()
        return link.info(), link

    return group.first_does(
        reach,
        timeout,
        "info",
        lambda found: to_plain(found[0]),
        lambda said: (from_plain(WeightInfo, said), None),
    )
