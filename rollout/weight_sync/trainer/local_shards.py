"""What one trainer rank holds of a source, read where it lies: nothing is gathered."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import SourceFailed
from rollout.weight_sync.trainer.reshard_plan import held
from rollout.weight_sync.trainer.shard_layout import ShardLayout, shard_bytes
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.trainer.watchdog import Watchdog
from rollout.weights import CASTABLE, Box, TensorMeta
from rollout.weights.box import cut


class LocalBoxes:
    """The boxes that this rank announced, read tensor by tensor and checked."""

    def __init__(self, source: Incoming, layout: ShardLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.metadata = {meta.name: meta for meta in layout.metadata}
        self._source = source
        self._last: tuple[str, dict[Box, Tensor]] = ("", {})

    def read(self, name: str) -> dict[Box, Tensor]:
        """The values of this rank's boxes of a tensor, valid until another one is read."""
        if self.has_read(name):
            return self._last[1]
        meta, announced = self.metadata[name], self.layout.have[self.rank].get(name, ())
        found = dict(self._source.local_values(name)) if announced else {}
        if found.keys() != set(announced) or any(
            tuple(values.shape) != box.shape or values.dtype != meta.dtype
            for box, values in found.items()
        ):
            raise SourceFailed(f"{name}: the source no longer holds the boxes it announced")
        self._last = (name, found)
        return found

    def held(self, name: str) -> dict[Box, Tensor]:
        """The same as they lie in this rank's memory until the update ends, in their own dtype."""
        announced = self.layout.have[self.rank].get(name, ())
        found = dict(self._source.held_values(name) or ()) if announced else {}
        if found.keys() != set(announced) or any(
            tuple(values.shape) != box.shape or values.dtype not in CASTABLE
            for box, values in found.items()
        ):
            raise SourceFailed(f"{name}: the source no longer holds the boxes it announced")
        return found

    def stays(self, name: str) -> bool:
        """Whether ``held`` has it: nothing is made of it for the update, nor is it codes."""
        found = self._source.held_values(name)
        return found is not None and all(values.dtype in CASTABLE for _, values in found)

    def has_read(self, name: str) -> bool:
        """Whether ``read`` costs nothing."""
        return self._last[0] == name

    def digest(self, name: str, stats: TransferStats, watch: Watchdog) -> dict[Box, Tensor]:
        """Read a tensor, and digest its boxes if this is the first time."""
        with watch.over(f"read {name}", self._last[0]):
            found = self.read(name)
        for box, values in found.items():
            if (name, box) not in stats.digests:
                stats.digest(name, values, self.metadata[name].shape, box)
        return found

    def digest_all(self, stats: TransferStats, watch: Watchdog) -> None:
        """Digest what has not been read yet."""
        for name in self.undigested(stats):
            self.digest(name, stats, watch)

    def undigested(self, stats: TransferStats) -> list[str]:
        """The tensors of which this rank has a box whose digest was not taken."""
        have = self.layout.have[self.rank].items()
        return [n for n, boxes in have if any((n, box) not in stats.digests for box in boxes)]


@dataclass(frozen=True, slots=True)
class _Shard:
    """``box`` lies in ``of``, which the rank holds."""

    of: Box
    box: Box


class LocalShards:
    """One rank's part of an update: its boxes, of which replicas each take an equal share."""

    def __init__(self, boxes: LocalBoxes, bucket_bytes: int) -> None:
        self._boxes = boxes
        self.cut = boxes.layout.cut(bucket_bytes)
        most = shard_bytes(bucket_bytes)
        self._shards: dict[str, list[_Shard]] = {}
        self._copies: dict[str, list[_Shard]] = {}  # which other ranks send
        for meta in boxes.layout.metadata:
            parts = list(_shards(meta, boxes, most))
            self._shards[meta.name] = [shard for shard, rank in parts if rank == boxes.rank]
            self._copies[meta.name] = [shard for shard, rank in parts if rank != boxes.rank]

    def pieces(self) -> Generator[Piece]:
        """The values of this rank's shards; on all ranks the same tensors, in the same order."""
        for name in self._shards:
            yield from self.of(name)

    def of(self, name: str) -> Iterator[Piece]:
        """Those of one tensor; a rank that has none yields it without values, on "meta"."""
        yield from self._read(name, self._shards[name])
        if not self._shards[name]:
            meta = self._boxes.metadata[name]
            nothing = torch.empty(meta.shape, dtype=meta.dtype, device="meta")
            yield Piece(name, meta.shape, Box.full(meta.shape), nothing)

    def copies(self, name: str) -> Iterator[Piece]:
        """Of one tensor, what this rank holds as well as the ranks that send it."""
        return self._read(name, self._copies[name])

    def _read(self, name: str, shards: list[_Shard]) -> Iterator[Piece]:
        shape, found = self._boxes.metadata[name].shape, self._boxes.read(name) if shards else {}
        for shard in shards:
            back = tuple(-start for start in shard.of.starts)
            values = found[shard.of].detach()[shard.box.shifted(back).slices]
            yield Piece(name, shape, shard.box, values, last=shard is shards[-1])


def _shards(meta: TensorMeta, boxes: LocalBoxes, most: int) -> Iterator[tuple[_Shard, int]]:
    """A rank's boxes of a tensor, cut, and who sends each part: those that hold it take turns."""
    elements = max(1, most // meta.dtype.itemsize)
    for box, ranks in held(meta.name, boxes.layout.have).items():
        if boxes.rank in ranks:
            share = min(elements, -(-box.numel // len(ranks)))
            for turn, part in enumerate(cut(box, max(1, share))):
                yield _Shard(box, part), ranks[turn % len(ranks)]
