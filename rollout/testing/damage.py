"""Damaged copies of tensors, of buckets and of what announces them: what ``faults.py`` sends."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weight_sync.transports.p2p import outgoing
from rollout.weights import INTEGERS, Box


def flipped(header: BucketHeader, payload: Tensor, bit: int) -> Tensor:
    """A copy with one bit of the tensors' bytes inverted; the gaps between them carry nothing."""
    spans = [(entry.offset, entry.nbytes) for entry in header.entries]
    for message, at in outgoing(header, 0):
        spans += [(at + e.offset - message.start, e.nbytes) for e in message.entries]
    total = 8 * sum(nbytes for _, nbytes in spans)
    payload = payload.clone()
    left = bit % total if total else 0
    for offset, nbytes in spans:
        if left < 8 * nbytes:
            payload[offset + left // 8] ^= 1 << left % 8
            break
        left -= 8 * nbytes
    return payload


def ends_alike(tensor: Tensor) -> bool:
    """Whether the first and the last element are the same, so that a swap would change nothing."""
    flat = tensor.reshape(-1)
    return not len(flat) or bool(torch.equal(flat[:1], flat[-1:]))


def swapped(tensor: Tensor) -> Tensor:
    swapped = tensor.clone(memory_format=torch.contiguous_format)
    flat = swapped.view(-1)
    flat[[0, -1]] = flat[[-1, 0]]
    return swapped


def misdescribed(header: BucketHeader, kind: str) -> BucketHeader:
    """The header with another dtype of the same width, or another shape, for its first entry."""
    if header.messages:
        first, *rest = header.messages
        entries = _misnamed(first.entries, kind)
        return replace(header, messages=(replace(first, entries=entries), *rest))
    return replace(header, entries=_misnamed(header.entries, kind))


def _misnamed(entries: tuple[BucketEntry, ...], kind: str) -> tuple[BucketEntry, ...]:
    first = entries[0]
    if kind == "dtype":
        wrong = replace(first, dtype=INTEGERS[first.dtype.itemsize])
    else:
        wrong = _misshapen(first)
    return (wrong, *entries[1:])


def _misshapen(entry: BucketEntry) -> BucketEntry:
    """As if of a tensor with one more row; the bytes are announced as they are."""
    if not entry.shape:
        return replace(entry, shape=(1,), box=Box.full((1,)))
    shape = (entry.shape[0] + 1, *entry.shape[1:])
    return replace(entry, shape=shape, box=Box.full(shape) if entry.sparse else entry.box)
