"""Packing: tensors copied, one after the other, into bounded, reused runs of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rollout.errors import ConfigError
from rollout.kernels import nontemporal_copy
from rollout.weight_sync.protocol.bucket import (
    ALIGNMENT,
    MAX_ENTRIES,
    WIRE_DTYPES,
    check_tensor,
)
from rollout.weight_sync.protocol.delta import CodedDelta
from rollout.weight_sync.protocol.in_place import InPlaceHeaders
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader
from rollout.weights import Box, Shape
from rollout.weights.box import cut
from rollout.wire.frames import flat_bytes


class BucketPacker:
    """Copies tensors, one after the other, into ``num_buffers`` reused uint8 buffers.

    ``add`` and ``flush`` yield ``(header, payload)`` for every bucket that got full; iterate them
    to the end. ``payload`` (uint8 [header.nbytes], a view on ``device``) may be overwritten once
    ``wait_free(header.index)`` has been called for it, which happens before bucket
    ``index + num_buffers`` is begun. Peak memory: ``num_buffers * bucket_bytes``.

    A tensor that fits is never cut; a larger one is cut into boxes of rows, then of parts of rows.
    Where every rank adds tensors of the same names, shapes and dtypes, all see the same buckets: a
    rank that only follows uses ``device="meta"`` and meta tensors, and holds no memory.
    ``buffers``: memory to pack into, instead of ``num_buffers`` that are made as they are needed.
    """

    def __init__(
        self,
        bucket_bytes: int,
        device: torch.device | str = "cpu",
        num_buffers: int = 2,
        wait_free: Callable[[int], None] | None = None,
        buffers: Sequence[Tensor] = (),
        headers: InPlaceHeaders | None = None,
    ) -> None:
        if bucket_bytes < ALIGNMENT:
            raise ConfigError(f"bucket_bytes must be at least {ALIGNMENT}, got {bucket_bytes}")
        if num_buffers < 1:
            raise ConfigError(f"num_buffers must be positive, got {num_buffers}")
        assert all(buffer.numel() >= bucket_bytes for buffer in buffers)
        self.bucket_bytes = bucket_bytes
        self.device = torch.device(device)
        self.wait_free = wait_free
        self.num_buckets = 0  # finished ones
        self.num_tensors = 0
        self.num_bytes = 0  # of tensors, without the gaps of alignment
        self._buffers: list[Tensor | None] = [*buffers] or [None] * num_buffers
        self._headers = headers or InPlaceHeaders()
        self._entries: list[BucketEntry] = []
        self._end = 0  # bytes used in the current bucket
        self._open = False  # whether the current bucket's buffer is ours to write

    def begin(self, nbytes: int) -> Iterator[tuple[BucketHeader, Tensor]]:
        """Make room for a tensor of ``nbytes`` to come; yields the bucket that was too full."""
        if self._entries and not self._fits(nbytes) and nbytes <= self.bucket_bytes:
            yield self._finish()

    def release(self) -> None:
        """Let go of the buffers, and of whoever waits for them: nothing is packed any more."""
        self.wait_free = None
        self._buffers = [None] * len(self._buffers)

    def buffer_for(self, dtype: torch.dtype, shape: Shape) -> Tensor | None:
        """Where ``add`` will put the next tensor, uninitialised; None where it will be cut.

        ``add`` copies nothing if the tensor was written there.
        """
        nbytes = prod(shape) * dtype.itemsize
        if not nbytes or not self._fits(nbytes) or dtype not in WIRE_DTYPES:
            return None
        start = _aligned(self._end)
        return self._buffer()[start : start + nbytes].view(dtype).view(shape)

    def _fits(self, nbytes: int) -> bool:
        """Whether a tensor can follow in the current bucket."""
        room = self.bucket_bytes - _aligned(self._end)
        return nbytes <= room and len(self._entries) < MAX_ENTRIES

    def add(
        self, name: str, tensor: Tensor, at: tuple[Shape, Box] | None = None
    ) -> Iterator[tuple[BucketHeader, Tensor]]:
        """Copy ``tensor`` in (any device, any strides); yields the buckets that this filled.

        ``at``: the shape of the whole tensor and the box of it that ``tensor`` is.
        """
        check_tensor(name, tensor)
        tensor = tensor.detach()
        size = tensor.dtype.itemsize
        self.num_tensors += 1
        self.num_bytes += tensor.numel() * size
        shape, piece = at if at is not None else (tuple(tensor.shape), None)
        part = _Part(name, tensor, shape, piece or Box.full(shape))
        pending = [part.box]
        while pending:
            box = pending.pop()
            room = self.bucket_bytes - _aligned(self._end)
            if len(self._entries) >= MAX_ENTRIES:
                room = -1
            if box.numel * size <= room:
                self._put(part, box)
                continue
            whole = box.numel * size <= self.bucket_bytes
            head = None if whole else _leading(box, room // size)
            if head is not None:
                pending.append(_without(box, head))
                self._put(part, head)
            elif self._entries:
                yield self._finish()
                pending.append(box)
            else:  # not even one row of an empty bucket's size: cut the row itself
                row = _leading(box, box.numel // _extent(box))
                assert row is not None
                rest = _without(box, row)
                pending += [rest, row] if rest.numel else [row]

    def zero_copy(self, name: str, tensor: Tensor) -> Iterator[tuple[BucketHeader, Tensor]]:
        """Buckets of this tensor alone, whose payloads are its own memory: nothing is copied.

        ``tensor``: contiguous, on ``device``, and not to be overwritten before the last of these
        buckets has been taken. What was begun before it is yielded first.
        """
        check_tensor(name, tensor)
        yield from self.flush()
        data = flat_bytes(tensor)
        at, shape = 0, tuple(tensor.shape)
        for box in cut(Box.full(shape), self.bucket_bytes // tensor.dtype.itemsize):
            nbytes = box.numel * tensor.dtype.itemsize
            entry = BucketEntry(name, tensor.dtype, shape, box, 0, nbytes)
            yield BucketHeader(self.num_buckets, (entry,), nbytes), data[at : at + nbytes]
            self.num_buckets += 1
            at += nbytes
        self.num_tensors += 1
        self.num_bytes += at

    def in_place(
        self, parts: Sequence[tuple[str, Tensor]]
    ) -> Iterator[tuple[BucketHeader, Sequence[Tensor]]]:
        """One bucket of contiguous tensors that are read where they lie, each a region of its own.

        What was begun before it must have been flushed.
        """
        assert not self._entries
        header = self._headers.header(self.num_buckets, parts)
        regions = [tensor for _, tensor in parts]
        self.num_tensors += len(parts)
        self.num_bytes += sum(entry.nbytes for entry in header.entries)
        self.num_buckets += 1
        yield header, regions

    def add_delta(self, name: str, delta: CodedDelta) -> Iterator[tuple[BucketHeader, Tensor]]:
        """Copy changes in, at most ``bucket_bytes`` of them; they are never cut."""
        assert delta.nbytes <= self.bucket_bytes
        start = _aligned(self._end)
        if start + delta.nbytes > self.bucket_bytes or len(self._entries) >= MAX_ENTRIES:
            yield self._finish()
            start = 0
        if delta.nbytes:
            self._buffer()[start : start + delta.nbytes].copy_(delta.data)
        self._entries.append(
            BucketEntry(
                name, delta.dtype, delta.shape, delta.box, start, delta.nbytes,
                delta.width, delta.count, delta.inflated, cell=delta.cell,
            )
        )  # fmt: skip
        self._end = start + delta.nbytes
        self.num_tensors += 1
        self.num_bytes += delta.nbytes

    def flush(self) -> Iterator[tuple[BucketHeader, Tensor]]:
        """Yield the last, partly filled bucket, if there is one."""
        if self._entries:
            yield self._finish()

    def _put(self, part: _Part, box: Box) -> None:
        offset, tensor = _aligned(self._end), part.tensor
        nbytes = box.numel * tensor.dtype.itemsize
        if nbytes:
            room = self._buffer()[offset : offset + nbytes]
            into = room.view(tensor.dtype).view(box.shape)
            values = tensor[box.shifted(tuple(-n for n in part.box.starts)).slices]
            if into.data_ptr() != values.data_ptr() or not values.is_contiguous():
                nontemporal_copy(into, values)
        entry = BucketEntry(part.name, tensor.dtype, part.shape, box, offset, nbytes)
        self._entries.append(entry)
        self._end = offset + nbytes

    def _buffer(self) -> Tensor:
        """The current bucket's buffer; waits until its previous content is no longer needed."""
        turn = self.num_buckets % len(self._buffers)
        buffer = self._buffers[turn]
        if buffer is None:
            buffer = torch.empty(self.bucket_bytes, dtype=torch.uint8, device=self.device)
            self._buffers[turn] = buffer
        if not self._open:
            self._open = True
            earlier = self.num_buckets - len(self._buffers)
            if earlier >= 0 and self.wait_free is not None:
                self.wait_free(earlier)
        return buffer

    def _finish(self) -> tuple[BucketHeader, Tensor]:
        header = BucketHeader(self.num_buckets, tuple(self._entries), self._end)
        payload = self._buffer()[: self._end]
        self._entries, self._end, self._open = [], 0, False
        self.num_buckets += 1
        return header, payload


@dataclass(frozen=True, slots=True)
class _Part:
    """What one ``add`` packs: ``box`` of a tensor of ``shape``."""

    name: str
    tensor: Tensor
    shape: Shape
    box: Box


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _axis(box: Box) -> int:
    """The first dimension along which ``box`` can be cut."""
    return next(i for i, n in enumerate(box.shape) if n > 1)


def _extent(box: Box) -> int:
    return box.shape[_axis(box)]


def _leading(box: Box, numel: int) -> Box | None:
    """As many leading rows of ``box`` as hold at most ``numel`` elements; None for no row."""
    axis = _axis(box)
    rows = max(0, numel) // (box.numel // box.shape[axis])
    if rows < 1:
        return None
    stop = min(box.stops[axis], box.starts[axis] + rows)
    return Box(box.starts, (*box.stops[:axis], stop, *box.stops[axis + 1 :]))


def _without(box: Box, head: Box) -> Box:
    """What is left of ``box`` behind its leading part ``head`` (possibly nothing)."""
    axis = _axis(box)
    starts = (*box.starts[:axis], head.stops[axis], *box.starts[axis + 1 :])
    return Box(starts, box.stops)
