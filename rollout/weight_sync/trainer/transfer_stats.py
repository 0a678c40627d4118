"""What one trainer rank has sent and digested in one update."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollout.kernels import DigestedAs, digest, digest_regions
from rollout.kernels.region_table import RegionTables
from rollout.weight_sync.protocol.digests import MASK, combine
from rollout.weight_sync.protocol.messages import BucketHeader
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weights import Box, Shape, TensorMeta

WireDtype = Callable[[str, torch.dtype], torch.dtype]  # of a tensor's name and dtype


class PlacesInPlace:
    """What the tensors of buckets that are read where they lie are digested as: kept as long as
    their headers are.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[BucketHeader, list[torch.dtype], list[DigestedAs]]] = {}

    def of(self, header: BucketHeader, wire: WireDtype) -> list[DigestedAs]:
        dtypes = [wire(entry.name, entry.dtype) for entry in header.entries]
        last = self._last.get(header.index)
        if last is None or last[0] is not header or last[1] != dtypes:
            entries = zip(header.entries, dtypes, strict=True)
            places = [DigestedAs(entry.shape, entry.box, dtype) for entry, dtype in entries]
            last = self._last[header.index] = header, dtypes, places
        return last[2]


@dataclass(slots=True)
class TransferStats:
    """Counts, seconds and digests; what the seal and the receipt say is from the first rank's."""

    digests: dict[tuple[str, Box], int] = field(default_factory=dict)
    num_bytes: int = 0  # of the tensors
    wire_bytes: int = 0
    num_buckets: int = 0
    changed: int = 0  # elements sent
    gather_seconds: float = 0.0
    transfer_seconds: float = 0.0
    digest_seconds: float = 0.0
    # kept between updates
    tables: RegionTables = field(default_factory=RegionTables)
    places: PlacesInPlace = field(default_factory=PlacesInPlace)

    def digest(self, name: str, values: Tensor, shape: Shape, box: Box) -> None:
        started = time.perf_counter()
        self.digests[name, box] = digest(values, shape, box)
        self.digest_seconds += time.perf_counter() - started

    def digest_piece(self, piece: Piece) -> None:
        """Nothing of one without values: another rank has them."""
        if not piece.values.is_meta:
            self.digest(piece.name, piece.values, piece.shape, piece.box)

    def digest_boxes(
        self, boxes: Mapping[tuple[str, Box], Tensor], metadata: Mapping[str, TensorMeta]
    ) -> None:
        """The digests of boxes by (name, box), on one device, each once it is cast to the dtype
        that ``metadata`` says.
        """
        started = time.perf_counter()
        places = [DigestedAs(metadata[n].shape, box, metadata[n].dtype) for n, box in boxes]
        found = digest_regions([*boxes.values()], places, self.tables)
        for at, (value, _) in zip(boxes, found, strict=True):
            self.digests[at] = value
        self.digest_seconds += time.perf_counter() - started

    def digest_in_place(
        self,
        header: BucketHeader,
        tensors: Sequence[Tensor],
        wire: WireDtype,
    ) -> None:
        """The digests of a bucket's whole tensors, on one device, each once it is cast to what
        ``wire`` says of its name and dtype.
        """
        started = time.perf_counter()
        found = digest_regions(tensors, self.places.of(header, wire), self.tables)
        for entry, (value, _) in zip(header.entries, found, strict=True):
            self.digests[entry.name, entry.box] = value
        self.digest_seconds += time.perf_counter() - started

    def digest_bucket(self, header: BucketHeader, payload: Tensor) -> None:
        """The digests of a bucket that holds whole tensors and boxes of them, no changes."""
        started = time.perf_counter()
        values, places = [], []
        for entry in header.entries:
            raw = payload[entry.offset : entry.offset + entry.nbytes]
            values.append(raw.view(entry.dtype).view(entry.box.shape))
            places.append(DigestedAs(entry.shape, entry.box, entry.dtype))
        found = digest_regions(values, places, self.tables)
        for entry, (value, _) in zip(header.entries, found, strict=True):
            self.digests[entry.name, entry.box] = value
        self.digest_seconds += time.perf_counter() - started

    def by_tensor(self) -> dict[str, int]:
        """The digests, added up over the boxes of each tensor."""
        found: dict[str, int] = {}
        for (name, _), value in self.digests.items():  # boxes of one tensor share no element
            found[name] = (found.get(name, 0) + value) & MASK
        return found

    def report(self) -> dict[str, Any]:
        """What the first rank has to know of this one, JSON-able."""
        sent = [self.num_buckets, self.wire_bytes, self.changed]
        return {"sent": sent, "digests": self._rows()}

    def add_up(self, reports: Sequence[Mapping[str, Any]]) -> dict[str, int]:
        """On the first rank: count what all have sent; the digests of the whole tensors.

        Raises ``ChecksumMismatch`` where two ranks hold the same box with other values.
        """
        buckets, wire, changed = zip(*(report["sent"] for report in reports), strict=True)
        self.num_buckets, self.wire_bytes, self.changed = sum(buckets), sum(wire), sum(changed)
        return combine([report["digests"] for report in reports])

    def _rows(self) -> list[list[Any]]:
        return [
            [name, list(box.starts), list(box.stops), value]
            for (name, box), value in self.digests.items()
        ]
