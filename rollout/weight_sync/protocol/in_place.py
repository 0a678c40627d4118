"""What is read where it lies: which memory it lies in, and the headers of buckets of that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.weight_sync.protocol.bucket import check_tensor
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weights import Box
from rollout.wire.codec import Count, Many, Text


@dataclass(frozen=True, slots=True)
class Given:
    """Where one process's tensors lie: of each the index of its allocation's handle, how many bytes
    behind the beginning of that, and the dtype in which it lies there.
    """

    handles: Many[Text] = ()
    places: Many[tuple[Count, Count]] = ()
    dtypes: Many[torch.dtype] = ()


class InPlaceHeaders:
    """Makes headers of buckets that are read where they lie, and keeps those of the last update:
    the next one's are often the same.
    """

    def __init__(self) -> None:
        self._last: dict[int, tuple[object, BucketHeader]] = {}
        self._placed: dict[int, tuple[BucketHeader, object, tuple[BucketEntry, ...]]] = {}

    def header(self, index: int, parts: Sequence[tuple[str, Tensor]]) -> BucketHeader:
        """Of whole tensors, each a region of its own."""
        key = [(name, tensor.dtype, tensor.shape) for name, tensor in parts]
        last = self._last.get(index)
        if last is None or last[0] != key:
            last = self._last[index] = key, self._made(index, parts)
        return last[1]

    def placed(self, header: BucketHeader, given: Sequence[Given]) -> tuple[BucketEntry, ...]:
        """The entries of a header, each where and in the dtype that ``given`` says: those of one
        process after those of another, as their regions are.
        """
        lies = [(one.places, one.dtypes, len(one.handles)) for one in given]
        last = self._placed.get(header.index)
        if last is None or last[0] is not header or last[1] != lies:
            last = self._placed[header.index] = header, lies, tuple(_placed(header, given))
        return last[2]

    def _made(self, index: int, parts: Sequence[tuple[str, Tensor]]) -> BucketHeader:
        entries = []
        for region, (name, tensor) in enumerate(parts):
            check_tensor(name, tensor)
            shape = tuple(tensor.shape)
            box = Box.full(shape)
            entries.append(
                BucketEntry(name, tensor.dtype, shape, box, 0, tensor.nbytes, region=region)
            )
        return BucketHeader(index, tuple(entries), 0)


def _placed(header: BucketHeader, given: Sequence[Given]) -> Iterator[BucketEntry]:
    entries, before = iter(header.entries), 0
    for one in given:
        for (at, offset), dtype in zip(one.places, one.dtypes, strict=True):
            entry = next(entries)
            nbytes = entry.box.numel * dtype.itemsize
            yield replace(entry, region=before + at, offset=offset, dtype=dtype, nbytes=nbytes)
        before += len(one.handles)
    assert next(entries, None) is None, "what is in a bucket lies somewhere"
