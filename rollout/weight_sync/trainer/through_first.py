"""What ranks send by way of the first one, where it alone can reach the engine."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from rollout.errors import RolloutError
from rollout.weight_sync.protocol.delta import CodedDelta
from rollout.weight_sync.protocol.messages import NO_CELL, BucketEntry, BucketHeader
from rollout.weight_sync.trainer.bucket_sender import BucketSender
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.wire.codec import from_plain, to_plain
from rollout.wire.frames import flat_bytes


class ThroughFirst:
    """Pieces of all ranks by way of the first one, where it alone can reach the engine.

    The one place where weights travel over the rank group's own sockets: changes, mostly, after
    each vote, and at most ``bucket_bytes`` and its part of one tensor from each rank. The first
    one has the bytes of one rank at a time. ``sender``: the first rank's; None on the others.
    """

    def __init__(
        self, group: RankGroup, sender: BucketSender | None, stats: TransferStats,
        *, bucket_bytes: int, timeout: float,
    ) -> None:  # fmt: skip
        self._group, self._sender, self._stats = group, sender, stats
        self.bucket_bytes, self._timeout = bucket_bytes, timeout
        self._entries: list[BucketEntry] = []
        self._blobs: list[Tensor] = []
        self._end = 0

    @property
    def failure(self) -> RolloutError | None:
        return None if self._sender is None else self._sender.failure

    def add(self, name: str, part: Piece | CodedDelta) -> None:
        if isinstance(part, CodedDelta):
            dtype, blob = part.dtype, part.data
            coded, cell = (part.width, part.count, part.inflated), part.cell
        else:
            dtype, blob = part.values.dtype, flat_bytes(part.values.cpu().contiguous())
            coded, cell = (0, 0, 0), NO_CELL
        entry = BucketEntry(
            name, dtype, part.shape, part.box, self._end, len(blob), *coded, cell=cell
        )
        self._entries.append(entry)
        self._blobs += [blob, blob.new_zeros(-len(blob) % 8)]
        self._end += -(-len(blob) // 8) * 8

    def exchange(self) -> None:
        """Collective: hand what was added to the first rank, which packs it in rank order."""
        started = time.perf_counter()
        header = to_plain(BucketHeader(0, tuple(self._entries), self._end))
        data = torch.cat(self._blobs) if self._blobs else torch.empty(0, dtype=torch.uint8)
        self._entries, self._blobs, self._end = [], [], 0
        self._group.collect([header], data, self._timeout, "changes", self._take)
        self._stats.gather_seconds += time.perf_counter() - started

    def flush(self) -> None:
        if self._sender is not None:
            self._sender.flush()

    def give_up(self, reason: str) -> None:
        if self._sender is not None:
            self._sender.give_up(reason)

    def _take(self, rows: list[Any], payload: Tensor) -> None:
        for entry in from_plain(BucketHeader, rows[0]).entries:
            self._forward(entry, payload[entry.offset : entry.offset + entry.nbytes])

    def _forward(self, entry: BucketEntry, blob: Tensor) -> None:
        assert self._sender is not None
        part: Piece | CodedDelta
        if entry.sparse:
            part = CodedDelta(
                entry.dtype, entry.shape, entry.box, entry.count, entry.sparse, blob,
                entry.inflated, entry.cell,
            )  # fmt: skip
        else:
            values = blob.view(entry.dtype).view(entry.box.shape)
            part = Piece(entry.name, entry.shape, entry.box, values)
        self._sender.add(entry.name, part)
