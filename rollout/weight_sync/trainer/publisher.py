"""The trainer's side of an update, from the first call to the receipt; all ranks or none.

Collective over the source's ranks. Only the first rank opens, seals and commits the update; the
others take part in the gathers or send what they hold, vote after each bucket's worth of bytes, and
get the same receipt or the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from typing import Any

from rollout.distributed.interpreter import quick_switches
from rollout.errors import RolloutError, WeightError
from rollout.weight_sync.protocol.adapters import check_merged
from rollout.weight_sync.protocol.committed import Committed, DeltaBase
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.encoder import Encoder, Encoding, choose_encoding
from rollout.weight_sync.trainer.lockstep import agreed_source
from rollout.weight_sync.trainer.mapped_shards import lying
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sending import Sending
from rollout.weight_sync.trainer.session import Opener, UpdatePlan, UpdateSession, by_boxes
from rollout.weight_sync.trainer.shard_layout import PlanCache, exchange_layout
from rollout.weight_sync.trainer.sources.detect import Detected
from rollout.weight_sync.trainer.sources.update import detect_update
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.trainer.watchdog import Watchdog
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
    adapters: Mapping[str, Any] | None = None,
) -> UpdateReceipt:
    """Make the weights of ``obj`` live on the engine as one version, or change nothing.

    ``obj`` is whatever ``detect`` accepts. Every rank of a distributed source calls this, in the
    same order, and gets the same receipt or error. ``connect`` is called on the first rank, and on
    ranks that open a stream of their own. ``base``: what this rank last committed to this engine,
    for deltas (None: every update is full). ``plans``: cache of which box goes where. ``adapters``:
    by name, sent with ``obj``, or by themselves if it is None.
    """
    timeout, plans = options.timeout, plans or PlanCache()
    stats = TransferStats(tables=plans.tables, places=plans.places)
    found = _detected(obj, adapters or {}, plans)
    with ExitStack() as stack:
        stack.enter_context(quick_switches())
        group = stack.enter_context(closing(found.rank_group(timeout)))
        info, link = _reach(group, connect, timeout)
        with _told(link):
            source = agreed_source(
                *(found, info, group, timeout),
                partial=options.partial,
                settings=options.same_on_ranks(),
            )
            check_merged(source.merged, {*info.adapters, *source.adapters}, sent=True)
        copies = base.take() if base is not None and source.models else Committed()
        look = group.size > 1 or by_boxes(options.transport, info)
        lies = partial(lying, source, info, group.ranks)
        layout = exchange_layout(source, group, timeout, plans, copies, lies) if look else None

        def open_update() -> UpdateSession:
            assert link is not None
            encoding = choose_encoding(options, info, base, copies, layout)
            if source.adapters:
                encoding = Encoding(name="full", reason="adapters travel whole")
            opener = Opener(connect, link, info, options, layout, plans, stats)
            return opener.open(source, encoding)

        plan, session = _first_opens(group, open_update, timeout, stack)
        encoder = Encoder(options, info, base, copies, plan.encoding, is_first=group.is_sender)
        sending = Sending(group, source, layout, plan, session, encoder, stats, options)
        sink = sending.open_sink(connect, stack)
        with Watchdog(group, options.patience or timeout, sink.give_up) as watch:
            sending.run(sink, plans, info, watch)
        receipt = sending.commit()
        plans.proven.add(plan.pieces)
        if source.models:
            encoder.settle(receipt, sending.shards)
        elif base is not None:
            base.stays(info, receipt)
        return receipt


@contextmanager
def _told(link: WeightLink | None) -> Iterator[None]:
    """Tell the engine what the trainer's own checks refuse: it counts as a failed update."""
    try:
        yield
    except WeightError as error:
        if link is not None:
            with suppress(RolloutError), closing(link.open()) as channel:
                channel.abort(str(error))
        raise


def _detected(obj: Any, adapters: Mapping[str, Any], plans: PlanCache) -> Detected:
    found = detect_update(obj, adapters, plans.adapters)
    if not plans.told_alone and (alone := found.calls_alone()) is not None:
        plans.told_alone = True
        log.warning("%s", alone)
    return found


def _first_opens(
    group: RankGroup, open_update: Callable[[], UpdateSession], timeout: float, stack: ExitStack
) -> tuple[UpdatePlan, UpdateSession | None]:
    """Collective: the plan of the update that the first rank opens; ``stack`` closes it."""

    def act() -> tuple[UpdatePlan, UpdateSession | None]:
        session = open_update()
        return session.plan, stack.enter_context(session)

    return group.first_does(
        act,
        2 * timeout,
        "begin",
        lambda opened: opened[0].to_wire(),
        lambda said: (UpdatePlan.from_wire(said), None),
    )


def _reach(
    group: RankGroup, connect: Callable[[], WeightLink], timeout: float
) -> tuple[WeightInfo, WeightLink | None]:
    """What the engine announces; on the first rank also the link to it."""

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
