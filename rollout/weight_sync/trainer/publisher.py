"""The trainer's side of an update: gather, pack, send, seal, commit; all ranks or none.

Collective over the source's ranks. Rank 0 of them (the sender) alone talks to the engine; the
others take part in the gathers, in one continue/abort vote per bucket's worth of bytes, and get
the same receipt or the same error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from typing import Any, cast

from torch import Tensor

from rollout.errors import RolloutError, from_wire, to_wire
from rollout.weight_sync.protocol.codec import info_from_wire, receipt_from_wire
from rollout.weight_sync.protocol.delta import DeltaBase
from rollout.weight_sync.protocol.link import WeightLink
from rollout.weight_sync.protocol.messages import UpdateReceipt, WeightInfo
from rollout.weight_sync.trainer.attest import OwnDigests
from rollout.weight_sync.trainer.lockstep import Walk, Watchdog, source_failed, watchdog
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.own_part import OwnPart
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.reshard import Rounds
from rollout.weight_sync.trainer.session import Publication
from rollout.weight_sync.trainer.sources.base import LocalSource
from rollout.weight_sync.trainer.sources.detect import (
    agreement_for,
    calls_alone,
    incoming,
    opened,
    source_for,
)
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.survey import PlanCache, survey

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

    ``obj`` is whatever ``source_for`` accepts. Every rank of a distributed source calls this in
    the same order; the sender calls ``connect``, and so do the others where each has a stream of
    its own. ``base`` holds what the same engine last committed, which a delta is built on (None:
    every update is full): the sender's copy of all of it, or each rank's of its own part.
    ``plans`` remembers between updates, on every rank, what goes where. Returns the same receipt
    on every rank; raises the same error of the tree on every rank that is still alive.
    """
    timeout = options.timeout
    plans = plans if plans is not None else PlanCache()
    obj = opened(obj)
    if not plans.told_alone and (alone := calls_alone(obj)) is not None:
        plans.told_alone = True
        log.warning("%s", alone)
    agreement = agreement_for(obj, timeout=timeout)
    with closing(agreement), closing(Publication(options, base, plans)) as sending:
        told = _on_sender(agreement, timeout, "info", lambda: sending.meet(connect))
        info = info_from_wire(told["info"])
        source, failure = _source(obj, info, agreement, options)
        agreement.vote(failure, timeout, "source")
        assert source is not None
        look = told["look"] or agreement.size > 1
        part = OwnPart(base, options)
        found = survey(source, agreement, timeout, plans, part.mark) if look else None
        told = _on_sender(agreement, 2 * timeout, "begin", lambda: sending.begin(source, found))
        with watchdog(agreement, timeout, sending.give_up) as watch:
            if "rounds" in told:
                assert found is not None
                plans.learn(told["rounds"], info)
                rounds = Rounds(source, found, agreement, options, sending, watch)
                rounds.run(told["rounds"]["offer"], plans)
            elif told["changes"] == "send" or "lanes" in told:
                assert found is not None
                part.send(source, found, info, agreement, sending, told, connect, watch)
            else:
                own = None
                if told["attested"] and found is not None:
                    local = cast(LocalSource, source)
                    own = OwnDigests(local, found, agreement.rank, sending.books, watch)
                _stream(source, agreement, options, sending, watch, own)
                if own is not None:
                    own.sum_up(agreement, timeout)
        done = _on_sender(agreement, 4 * timeout, "commit", sending.finish)
        receipt = receipt_from_wire(done["receipt"])
        if told["changes"] and found is not None:
            part.settle(source, found, agreement.rank, receipt, told["changes"])
        return receipt


def _source(
    obj: Any, info: WeightInfo, agreement: Agreement, options: UpdateOptions
) -> tuple[Incoming | None, Exception | None]:
    try:
        source = source_for(
            obj,
            aliases=info.aliases,
            dtype=info.dtype,
            agreement=agreement,
            timeout=options.timeout,
            tensors=info.tensors,
            partial=options.partial,
        )
        return incoming(source, info.dtype, tensors=info.tensors, aliases=info.aliases), None
    except RolloutError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - the trainer's own code, or what it passed
        return None, source_failed(error, "")


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
        except Exception as error:  # noqa: BLE001 - the other ranks wait to hear how it went
            said = {"error": to_wire(error)}
            failure = from_wire(said["error"])
            failure.__cause__ = error
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
    source: Incoming,
    agreement: Agreement,
    options: UpdateOptions,
    sending: Publication,
    watch: Watchdog,
    own: OwnDigests | None,
) -> None:
    """Iterate the source in lockstep, sending on the sender."""
    shipment = sending.shipment
    if shipment is not None:
        source.place_by(shipment.room)

    def take(name: str, tensor: Tensor) -> None:
        if own is not None:
            own.take(name)
        if shipment is not None:
            shipment.add(name, sending.gathered(tensor))

    walk = Walk(
        source,
        agreement,
        watch,
        timeout=options.timeout,
        step_bytes=options.bucket_bytes,
        take=take,
        failed=lambda: sending.failure,
    )
    try:
        walk.run(flush=lambda: None if shipment is None else shipment.flush())
    finally:
        sending.books.gather_seconds += walk.seconds
