"""What an update would take: seconds, and memory on both sides; nothing is moved to find out."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollout.config import DEFAULT_BUCKET_BYTES
from rollout.kernels import digest
from rollout.updates import WeightInfo
from rollout.weight_sync.transports import Road, roads, same_host
from rollout.weights import Box, TensorMeta, UpdateReceipt

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
    road = roads("auto", info)[0]
    seconds, basis = _by_receipt(total, receipts) or _by_rates(total, info, road)
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


def _by_rates(total: int, info: WeightInfo, road: Road) -> tuple[float, str]:
    """Each byte is digested twice and copied: out of the trainer, along the road, into place."""
    copy, digested = _rates()
    ranks = min(info.tensor_parallel_size, os.cpu_count() or 1)
    near = same_host(info)
    way = 2 / copy if near else 1 / NETWORK
    seconds = total * (1 / copy + 1 / digested + way + (1 / copy + 1 / digested) / ranks)
    by = f"{copy / 1e9:.1f} GB/s copied and {digested / 1e9:.1f} GB/s digested here"
    where = "the same host" if near else f"a network of {NETWORK / 1e9:g} GB/s, assumed"
    return seconds, f"no update to go by; {by}, {where}, by {road.transport}"


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
