"""The trainer's side of an update: gather, pack, send, seal, commit; all ranks or none.

Collective over the source's ranks. Rank 0 of them (the sender) alone talks to the engine; the
others take part in the gathers, in one continue/abort vote per bucket's worth of bytes, and get
the same receipt or the same error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from torch import Tensor

from rollout.errors import RolloutError, from_wire, to_wire
from rollout.update_wire import info_from_wire, receipt_from_wire
from rollout.updates import WeightInfo
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.delta import DeltaBase
from rollout.weight_sync.link import WeightLink
from rollout.weight_sync.options import UpdateOptions
from rollout.weight_sync.own_part import OwnPart
from rollout.weight_sync.publication import Publication, source_failed
from rollout.weight_sync.rounds import Rounds
from rollout.weight_sync.source import agreement_for, incoming, opened, source_for
from rollout.weight_sync.survey import PlanCache, survey
from rollout.weight_sync.values import Incoming
from rollout.weight_sync.watchdog import Watchdog
from rollout.weights import UpdateReceipt

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
    agreement = agreement_for(obj, timeout=timeout)
    with closing(agreement), closing(Publication(options, base, plans)) as sending:
        told = _on_sender(agreement, timeout, "info", lambda: sending.meet(connect))
        info = info_from_wire(told["info"])
        source, failure = _source(obj, info, agreement, options)
        agreement.vote(failure, timeout, "source")
        assert source is not None
        look = told["look"] == "asked" or (told["look"] == "auto" and agreement.size > 1)
        part = OwnPart(base, options)
        found = survey(source, agreement, timeout, plans, part.mark) if look else None
        told = _on_sender(agreement, 2 * timeout, "begin", lambda: sending.begin(source, found))
        if "p2p" in told:
            assert found is not None
            plans.learn(told["p2p"], info)
            Rounds(source, found, agreement, options, sending).run(told["p2p"]["where"], plans)
        elif told["changes"] == "send" or "lanes" in told:
            assert found is not None
            part.send(source, found, info, agreement, sending, told, connect)
        else:
            _stream(source, info, agreement, options, sending)
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
    info: WeightInfo,
    agreement: Agreement,
    options: UpdateOptions,
    sending: Publication,
) -> None:
    """Iterate the source in lockstep, sending on the sender, voting once per bucket's worth."""
    sizes = {meta.name: meta.nbytes for meta in info.tensors}
    shipment = sending.shipment
    if shipment is not None:
        source.place_by(shipment.room)
    items = _items(source)
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
                    error, item = source_failed(failure, last), None
                finally:
                    watchdog.disarm()
                sending.books.gather_seconds += time.perf_counter() - started
                if item is None:
                    break
                last = item[0]
                if shipment is not None:
                    shipment.add(*item)
                since_vote += sizes.get(last, 0)
                if since_vote >= options.bucket_bytes or sending.failure is not None:
                    since_vote = _vote(agreement, sending, since_vote, options)
            if shipment is not None and error is None:
                shipment.flush()
            agreement.vote(error or sending.failure, options.timeout, f"end, after {last!r}")
        finally:
            items.close()


def _vote(
    agreement: Agreement, sending: Publication, since_vote: int, options: UpdateOptions
) -> int:
    """One continue/abort flag of all ranks; the count since the last vote is returned.

    A sender that failed between votes goes on gathering until the next one: it must not leave the
    others alone in a collective.
    """
    if agreement.size > 1 and since_vote < options.bucket_bytes:
        return since_vote
    agreement.vote(sending.failure, options.timeout, "bucket")
    return 0


def _items(source: Incoming) -> Generator[tuple[str, Tensor]]:
    """So that an ``__iter__`` that raises does it at the first ``next``, like any other."""
    yield from source
