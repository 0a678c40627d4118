"""Questions about weights that move none: would this source fit, and does the engine hold it?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rollout.config import DEFAULT_BUCKET_BYTES
from rollout.errors import DeadlineExceeded, RolloutError, SourceFailed, WeightMismatch
from rollout.weight_sync.protocol.committed import Committed
from rollout.weight_sync.protocol.fit import differences
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.protocol.rates import measured_rates
from rollout.weight_sync.protocol.receipts import UpdateReceipt
from rollout.weight_sync.trainer.local_shards import LocalBoxes
from rollout.weight_sync.trainer.lockstep import Walk, agreed_source, source_failed
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.shard_layout import PlanCache, exchange_layout
from rollout.weight_sync.trainer.sources.detect import Detected, detect
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.trainer.watchdog import Watchdog
from rollout.weight_sync.transports import Way, same_host, ways
from rollout.weights import TensorMeta
from rollout.weights.components import component_of
from rollout.wire.codec import from_plain, to_plain

_RECENT = 8  # receipts that an estimate may rest on


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """How a source compares with an engine's weights at ``version``, the live one when it was read.

    ``differing``: sent and held, with other values. ``problems``: names, shapes and dtypes that do
    not fit (see ``preflight``). ``num_bytes`` is what an update would send. ``cost``: what it would
    take, by ``preflight`` alone, where the source knows what it will send.
    """

    version: int
    epoch: int
    differing: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    num_tensors: int = 0
    num_bytes: int = 0
    cost: UpdateCost | None = None

    @property
    def equal(self) -> bool:
        return not self.differing and not self.problems


class CheckLink(Protocol):
    def info(self) -> WeightInfo: ...

    def digests(self, timeout: float) -> dict[str, int]: ...

    def receipts(self) -> tuple[UpdateReceipt, ...]: ...


def preflight(
    obj: Any,
    *,
    connect: Callable[[], CheckLink],
    timeout: float,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> WeightReport:
    """Compare names, shapes and dtypes with what the engine wants; no weights are read or moved.

    Also says what an update would take (``cost``). Collective over the source's ranks. What would
    be refused before a byte is read is a problem, too; of a source that cannot be looked at before
    it is sent (a generator, which is not touched) the one problem says so.
    """
    found = detect(obj, take_first=False)
    with closing(found.rank_group(timeout)) as group:
        info, receipts = group.first_does(
            lambda: _standing(connect()), timeout, "check", _standing_to_wire, _standing_from_wire
        )
        metadata, problems = _foreseen(found, info, group)
        cost = expected_cost(metadata, info, receipts, bucket_bytes=bucket_bytes)
        return WeightReport(
            version=info.version,
            epoch=info.epoch,
            problems=tuple(problems),
            num_tensors=len(metadata),
            num_bytes=sum(meta.nbytes for meta in metadata),
            cost=cost if metadata else None,
        )


def _foreseen(
    found: Detected, info: WeightInfo, group: RankGroup
) -> tuple[tuple[TensorMeta, ...], list[str]]:
    """What would be sent, and what is wrong with it; reads no values and takes no item."""
    try:
        metadata = found.read(info, group).metadata()
    except WeightMismatch as error:
        return (), list(error.problems)
    except SourceFailed as error:
        return (), [str(error)]
    if metadata is None:
        return (), [
            f"cannot tell: what a {type(found.obj).__name__} will send is known only as it "
            "comes; pass a dict, a list or the module to have it checked"
        ]
    return metadata, differences(metadata, info.wanted, components=found.components)


def check_weights(obj: Any, *, connect: Callable[[], CheckLink], timeout: float) -> WeightReport:
    """Name the tensors of ``obj`` that differ from the live weights, by digest, beside generation.

    Collective over the source's ranks, like an update, but only digests cross the wire. Raises
    ``ChecksumMismatch`` when copies of one box differ between the engine's own ranks.
    """
    found = detect(obj)
    with closing(found.rank_group(timeout)) as group:
        info = group.first_does(
            lambda: connect().info(), timeout, "check", to_plain, partial(from_plain, WeightInfo)
        )
        source = agreed_source(found, info, group, timeout)
        stats, by_boxes, num_bytes = _digested(source, group, timeout)

        def verdict() -> dict[str, Any]:
            reports = [stats.report()]
            if by_boxes:
                reports = group.collect_rows(reports[0], timeout, "digests")
            live, held = _live_digests(connect(), info, timeout)
            mine = stats.add_up(reports)
            sent = {*source.components, *map(component_of, mine)}
            held = {n: v for n, v in held.items() if component_of(n) in sent}
            compared = {"version": live.version, "epoch": live.epoch}
            return {**compared, **_verdict(mine, info, held)}

        if by_boxes and not group.is_sender:
            group.collect_rows(stats.report(), timeout, "digests")
        said = group.first_does(verdict, timeout, "check", _as_it_is, _as_it_is)
        return WeightReport(
            version=said["version"],
            epoch=said["epoch"],
            differing=tuple(said["differing"]),
            problems=tuple(said["problems"]),
            num_tensors=said["num_tensors"],
            num_bytes=num_bytes,
        )


def _live_digests(
    link: CheckLink, info: WeightInfo, timeout: float
) -> tuple[WeightInfo, dict[str, int]]:
    """Of the live weights, and whose they are: what was live before the source was read, in
    ``info``, need not be what is read now.
    """
    deadline = time.monotonic() + timeout
    while True:
        held, now = link.digests(timeout), link.info()
        if (now.epoch, now.version) == (info.epoch, info.version):
            return now, held
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"commits came faster than the live weights could be read, for {timeout:g} s"
            )
        info = now


def _digested(
    source: Incoming, group: RankGroup, timeout: float
) -> tuple[TransferStats, bool, int]:
    """Digests of the source in the engine's dtype, whether every rank has some, and its bytes.

    They do where each can read its own boxes, and then nothing is gathered; else the first rank
    digests what is gathered.
    """
    stats = TransferStats()
    several = group.size > 1
    layout = exchange_layout(source, group, timeout, PlanCache(), Committed()) if several else None
    with Watchdog(group, timeout) as watch:
        if layout is not None and layout.problem is None:
            failure: Exception | None = None
            try:
                LocalBoxes(source, layout, group.rank).digest_all(stats, watch)
            except RolloutError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the trainer's own code
                failure = source_failed(error, "")
            group.vote(failure, 2 * timeout, "digests")
            return stats, True, sum(meta.nbytes for meta in layout.metadata)

        walk = Walk(
            source.pieces(),
            group,
            watch,
            timeout=timeout,
            step_bytes=DEFAULT_BUCKET_BYTES,
            take=stats.digest_piece,
        )
        walk.run()
        return stats, False, walk.num_bytes


def _verdict(mine: dict[str, int], info: WeightInfo, held: dict[str, int]) -> dict[str, Any]:
    owners = {name: info.aliases.get(name, name) for name in mine}
    unknown = [f"{name} is unknown" for name, owner in owners.items() if owner not in held]
    missing = [f"{name} is missing" for name in sorted(set(held) - set(owners.values()))]
    differing = [n for n, owner in owners.items() if owner in held and held[owner] != mine[n]]
    return {"differing": differing, "problems": unknown + missing, "num_tensors": len(mine)}


def _as_it_is(said: dict[str, Any]) -> dict[str, Any]:
    return said


def _standing(link: CheckLink) -> tuple[WeightInfo, list[UpdateReceipt]]:
    return link.info(), list(link.receipts()[-_RECENT:])


def _standing_to_wire(standing: tuple[WeightInfo, list[UpdateReceipt]]) -> dict[str, Any]:
    info, receipts = standing
    return {"info": to_plain(info), "receipts": [to_plain(one) for one in receipts]}


def _standing_from_wire(said: dict[str, Any]) -> tuple[WeightInfo, list[UpdateReceipt]]:
    return from_plain(WeightInfo, said["info"]), [
        from_plain(UpdateReceipt, row) for row in said["receipts"]
    ]


NETWORK = 1.25e9  # bytes a second that are assumed between hosts


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateCost:
    """An estimate for one full update; ``basis`` says what it rests on.

    ``sender_bytes``: at most, on the trainer rank that sends, beside its weights: two buckets and
    the largest tensor, gathered or cast. ``rank_bytes``: at most, on each engine rank: the shadow
    where there is none yet, two buckets, and what ``undo`` keeps.
    """

    seconds: float
    basis: str
    sender_bytes: int
    rank_bytes: int


def expected_cost(
    metadata: Sequence[TensorMeta],
    info: WeightInfo,
    receipts: Sequence[UpdateReceipt],
    *,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> UpdateCost:
    """By the engine's last full update where there was one, else by rates measured here (50 ms)."""
    total = sum(meta.nbytes for meta in metadata)
    largest = max((meta.nbytes for meta in metadata), default=0)
    buckets = 2 * min(bucket_bytes, total)
    memory = info.memory
    way = ways("auto", info)[0]
    seconds, basis = _by_receipt(total, receipts) or _by_rates(total, info, way)
    return UpdateCost(
        seconds=seconds,
        basis=basis,
        sender_bytes=buckets + largest,
        rank_bytes=buckets + memory.get("weights", 0) + memory.get("undo", 0),
    )


def _by_receipt(total: int, receipts: Sequence[UpdateReceipt]) -> tuple[float, str] | None:
    for receipt in reversed(receipts):
        if receipt.num_bytes and receipt.wire_bytes >= receipt.num_bytes:
            took = receipt.timings.get("total", 0.0)
            return (
                took * total / receipt.num_bytes,
                f"version {receipt.version} took {took:.3f} s by {receipt.transport}",
            )
    return None


def _by_rates(total: int, info: WeightInfo, by: Way) -> tuple[float, str]:
    """Each byte is digested twice and copied: out of the trainer, along the way, into place."""
    copy, digested = measured_rates()
    ranks = min(info.num_ranks, os.cpu_count() or 1)
    near = same_host(info)
    way = 2 / copy if near else 1 / NETWORK
    seconds = total * (1 / copy + 1 / digested + way + (1 / copy + 1 / digested) / ranks)
    rates = f"{copy / 1e9:.1f} GB/s copied and {digested / 1e9:.1f} GB/s digested here"
    where = "the same host" if near else f"a network of {NETWORK / 1e9:g} GB/s, assumed"
    return seconds, f"no update to go by; {rates}, {where}, by {by.transport.name}"
