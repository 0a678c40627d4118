"""Questions about weights that move none: would this source fit, and does the engine hold it?"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from rollout.config import DEFAULT_BUCKET_BYTES
from rollout.errors import RolloutError, SourceFailed, WeightMismatch, from_wire, to_wire
from rollout.kernels import digest
from rollout.weight_sync.protocol.codec import (
    info_from_wire,
    info_to_wire,
    receipt_from_wire,
    receipt_to_wire,
)
from rollout.weight_sync.protocol.digests import combine
from rollout.weight_sync.protocol.fit import differences
from rollout.weight_sync.protocol.messages import UpdateReceipt, WeightInfo
from rollout.weight_sync.trainer.bucket_sender import Books
from rollout.weight_sync.trainer.lockstep import Walk, source_failed, watchdog
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.reshard import HeldBoxes
from rollout.weight_sync.trainer.sources.base import LocalSource
from rollout.weight_sync.trainer.sources.detect import agreement_for, incoming, opened, source_for
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.survey import PlanCache, survey
from rollout.weight_sync.transports import Way, same_host, ways
from rollout.weights import Box, TensorMeta

_RECENT = 8  # receipts that an estimate may rest on


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightReport:
    """How a source compares with an engine's live weights at ``version``.

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
    agreement = agreement_for(obj, timeout=timeout)
    with closing(agreement):
        said = _said(agreement, timeout, lambda: _standing(connect()))
        info = info_from_wire(said["info"])
        receipts = [receipt_from_wire(row) for row in said["receipts"]]
        metadata, problems = _foreseen(obj, info, agreement)
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
    obj: Any, info: WeightInfo, agreement: Agreement
) -> tuple[tuple[TensorMeta, ...], list[str]]:
    """What ``obj`` would send, and what is wrong with it; reads no values and takes no item."""
    try:
        source = source_for(
            obj,
            aliases=info.aliases,
            dtype=info.dtype,
            agreement=agreement,
            tensors=info.tensors,
        )
        metadata = incoming(source, info.dtype, aliases=info.aliases).metadata()
    except WeightMismatch as error:
        return (), list(error.problems)
    except SourceFailed as error:
        return (), [str(error)]
    if metadata is None:
        return (), [
            f"cannot tell: what a {type(obj).__name__} will send is known only as it comes; pass "
            "a dict, a list or the module to have it checked"
        ]
    wanted = {meta.name: meta for meta in info.tensors}
    return metadata, differences(metadata, wanted, info.aliases)


def check_weights(obj: Any, *, connect: Callable[[], CheckLink], timeout: float) -> WeightReport:
    """Name the tensors of ``obj`` that differ from the live weights, by digest, beside generation.

    Collective over the source's ranks, like an update, but only digests cross the wire. Raises
    ``ChecksumMismatch`` when copies of one box differ between the engine's own ranks.
    """
    obj = opened(obj)
    agreement = agreement_for(obj, timeout=timeout)
    with closing(agreement):
        info = _shared_info(agreement, connect, timeout)
        source, failure = _source(obj, info, agreement)
        agreement.vote(failure, timeout, "source")
        assert source is not None
        mine, num_bytes = _digests(source, agreement, timeout)
        said = _said(agreement, timeout, lambda: _verdict(mine, info, connect().digests(timeout)))
        return WeightReport(
            version=info.version,
            epoch=info.epoch,
            differing=tuple(said["differing"]),
            problems=tuple(said["problems"]),
            num_tensors=len(mine),
            num_bytes=num_bytes,
        )


def _source(
    obj: Any, info: WeightInfo, agreement: Agreement
) -> tuple[Incoming | None, RolloutError | None]:
    try:
        source = source_for(
            obj, aliases=info.aliases, dtype=info.dtype, agreement=agreement, tensors=info.tensors
        )
        found = incoming(source, info.dtype, tensors=info.tensors, aliases=info.aliases)
    except RolloutError as error:
        return None, error
    except Exception as error:  # noqa: BLE001 - the trainer's own code, or what it passed
        return None, source_failed(error, "")
    return found, None


def _digests(source: Incoming, agreement: Agreement, timeout: float) -> tuple[dict[str, int], int]:
    """Digest per tensor of the source in the engine's dtype, and the bytes of all of them.

    On every rank where each can read its own boxes, and then nothing is gathered; else as it is
    gathered, on the sender alone.
    """
    found = survey(source, agreement, timeout, PlanCache()) if agreement.size > 1 else None
    with watchdog(agreement, timeout) as watch:
        if found is not None and found.problem is None:
            held = HeldBoxes(cast(LocalSource, source), found, agreement.rank, Books(), watch)
            failure = None
            try:
                held.finish()
            except RolloutError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - the trainer's own code
                failure = source_failed(error, "")
            agreement.vote(failure, 2 * timeout, "digests")
            rows = agreement.exchange({"digests": held.rows()}, timeout, "digests")
            return (
                combine([reply["digests"] for reply in rows]),
                sum(meta.nbytes for meta in found.metadata),
            )
        mine: dict[str, int] = {}
        sizes: list[int] = []

        def take(name: str, tensor: Tensor) -> None:
            if agreement.is_sender:
                shape = tuple(tensor.shape)
                mine[name] = digest(tensor, shape, Box.full(shape))
                sizes.append(tensor.nbytes)

        Walk(
            source, agreement, watch, timeout=timeout, step_bytes=DEFAULT_BUCKET_BYTES, take=take
        ).run()
        return mine, sum(sizes)


def _verdict(mine: dict[str, int], info: WeightInfo, held: dict[str, int]) -> dict[str, Any]:
    owners = {name: info.aliases.get(name, name) for name in mine}
    unknown = [f"{name} is unknown" for name, owner in owners.items() if owner not in held]
    missing = [f"{name} is missing" for name in held if name not in set(owners.values())]
    differing = [n for n, owner in owners.items() if owner in held and held[owner] != mine[n]]
    return {"differing": differing, "problems": unknown + missing}


def _standing(link: CheckLink) -> dict[str, Any]:
    receipts = [receipt_to_wire(receipt) for receipt in link.receipts()[-_RECENT:]]
    return {"info": info_to_wire(link.info()), "receipts": receipts}


def _shared_info(
    agreement: Agreement, connect: Callable[[], CheckLink], timeout: float
) -> WeightInfo:
    said = _said(agreement, timeout, lambda: {"info": info_to_wire(connect().info())})
    return info_from_wire(said["info"])


def _said(
    agreement: Agreement, timeout: float, act: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What ``act`` returned on the sender, on every rank; its error is raised on every rank."""
    said: dict[str, Any] | None = None
    if agreement.is_sender:
        try:
            said = act()
        except RolloutError as error:
            said = {"error": to_wire(error)}
    said = agreement.broadcast(said, 2 * timeout, "check")
    if "error" in said:
        raise from_wire(said["error"])
    return said


PROBE = 4 << 20  # elements of float32 that the rates are measured on
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
    copy, digested = _rates()
    ranks = min(info.tensor_parallel_size, os.cpu_count() or 1)
    near = same_host(info)
    way = 2 / copy if near else 1 / NETWORK
    seconds = total * (1 / copy + 1 / digested + way + (1 / copy + 1 / digested) / ranks)
    rates = f"{copy / 1e9:.1f} GB/s copied and {digested / 1e9:.1f} GB/s digested here"
    where = "the same host" if near else f"a network of {NETWORK / 1e9:g} GB/s, assumed"
    return seconds, f"no update to go by; {rates}, {where}, by {by.transport.name}"


def _rates() -> tuple[float, float]:
    """Bytes a second of a copy and of a digest in this process; the better of two tries each."""
    held = torch.ones(PROBE)
    other = torch.empty_like(held)
    box = Box.full(tuple(held.shape))
    copied = min(_seconds(lambda: other.copy_(held)) for _ in range(2))
    digested = min(_seconds(lambda: digest(held, tuple(held.shape), box)) for _ in range(2))
    return held.nbytes / copied, held.nbytes / digested


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return max(time.perf_counter() - started, 1e-9)
