"""Digests of slots, combined into digests of tensors.

A digest is a sum over elements, so the digests of disjoint boxes add up to the whole tensor's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rollout.errors import ChecksumMismatch, WeightMismatch, some
from rollout.weights import WeightSlot

MASK = (1 << 64) - 1
SlotDigest = list[Any]  # [source, starts, stops, digest], as it travels


def slot_rows(slots: Iterable[tuple[WeightSlot, int]]) -> list[SlotDigest]:
    """One row per slot, of the digest of what this rank holds for it."""
    return [
        [slot.source, list(slot.take.starts), list(slot.take.stops), value] for slot, value in slots
    ]


def total(digests: Iterable[int]) -> int:
    return sum(digests) & MASK


def combine(ranks: Sequence[Sequence[SlotDigest]]) -> dict[str, int]:
    """Digest per tensor from every rank's rows; a replicated box counts once.

    Raises ``ChecksumMismatch`` when two copies of one box differ.
    """
    boxes: dict[tuple[Any, ...], tuple[int, int]] = {}
    sums: dict[str, int] = {}
    torn: list[str] = []
    for rank, rows in enumerate(ranks):
        for source, starts, stops, value in rows:
            key = (source, tuple(starts), tuple(stops))
            first = boxes.setdefault(key, (rank, value))
            if first[0] == rank:
                sums[source] = (sums.get(source, 0) + value) & MASK
            elif first[1] != value:
                torn.append(f"{source} (ranks {first[0]} and {rank})")
    if torn:
        raise ChecksumMismatch(f"copies of one box differ between ranks: {some(torn)}")
    return sums


def check_finite(counts: Mapping[str, int]) -> None:
    """Raise ``WeightMismatch`` where a tensor holds NaN or infinity; ``counts`` says how many."""
    if counts:
        held = [f"{name} ({count} elements)" for name, count in counts.items()]
        raise WeightMismatch(
            f"{len(counts)} tensors hold NaN or infinity in the engine's dtype: {some(held)}; the "
            "update was refused. Has training diverged, or is a value out of the dtype's range? "
            "An engine started with check_finite=False takes them",
            problems=[f"{one} hold NaN or infinity" for one in held],
        )


def compare(sent: Mapping[str, int], held: Mapping[str, int], aliases: Mapping[str, str]) -> None:
    """Raise ``ChecksumMismatch`` naming every sent tensor that the ranks hold differently."""
    differing = [n for n, value in sent.items() if held.get(aliases.get(n, n)) != value]
    if differing:
        raise ChecksumMismatch(
            f"{len(differing)} of {len(sent)} tensors arrived changed: {some(differing)}; "
            "the update was refused, send it again"
        )
