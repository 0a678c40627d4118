"""A lossless sparse encoding: which elements of a tensor differ from the last committed version.

Elements are compared by their bits, so a NaN equals itself and -0.0 differs from 0.0. Changed
positions are coded as gaps (``kernels/gap_codes``) in 1, 2 or 4 bytes each, whichever is
shortest. Of quantised tensors it is ``cells`` that change. An entry's payload:

    values  count x dtype | 0..3 bytes | codes, little-endian, 1, 2 or 4 bytes each

or that, its values' bytes sorted by significance, as one zstd frame. The sender compares with a
copy that it keeps in host memory: of each rank's own shards where the source is distributed, else
of the tensors as they come. On a GPU the copy is pinned and passes through the device, tensor by
tensor: comparing, coding and reading run there. Nothing here loops over elements in Python.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.kernels import decode_gaps, diff_update, encode_gaps
from rollout.kernels.gap_codes import WIDTHS, escape
from rollout.weight_sync.protocol import zstd
from rollout.weight_sync.protocol.messages import NO_CELL, BucketEntry
from rollout.weights import Box, Shape, SparsePatch
from rollout.weights.positions import positions_in_whole
from rollout.wire.frames import tensor_bytes

_WORTH = 512  # bytes below which a frame is not tried


@dataclass(frozen=True, slots=True)
class CodedDelta:
    """The changed elements of one box of a tensor, as they travel."""

    dtype: torch.dtype
    shape: Shape  # of the whole tensor
    box: Box
    count: int
    width: int
    data: Tensor  # uint8
    inflated: int = 0  # bytes of ``data`` before compression; 0: it is not compressed
    cell: tuple[int, int] = NO_CELL  # what was counted, if not elements; see ``cells``

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """The changed elements of one tensor, ready to be packed."""

    shape: Shape
    values: Tensor  # [count], in the tensor's dtype
    codes: Tensor  # uint8, the coded gaps
    width: int

    @property
    def codes_offset(self) -> int:
        return codes_offset(len(self.values), self.values.dtype)

    @property
    def nbytes(self) -> int:
        return self.codes_offset + len(self.codes)

    def coded(
        self, shape: Shape | None = None, box: Box | None = None, *, compress: bool = False
    ) -> CodedDelta:
        """Of ``box`` of a tensor of ``shape``, whose own shape is this one's; None: of a whole."""
        shape = self.shape if shape is None else shape
        box = Box.full(shape) if box is None else box
        data, before = joined(self.values, self.codes_offset, self.codes, compress=compress)
        return CodedDelta(self.values.dtype, shape, box, len(self.values), self.width, data, before)


def encode(copy: Tensor, new: Tensor, max_bytes: int) -> EncodedDelta | None:
    """What turns ``copy`` into ``new``, bit for bit, and which has then been done to it.

    Contiguous and alike, ``copy`` in host memory. None where that takes more than ``max_bytes`` or
    is no shorter than ``new`` itself. Peak extra memory: some 24 bytes per changed element, and on
    a GPU as much as ``new``.
    """
    size = new.dtype.itemsize
    limit = min(max_bytes, new.numel() * size - 1)
    here = copy.to(new.device, non_blocking=True)
    changes = diff_update(here, new, limit // (size + 1))
    if changes is None:
        if here is not copy:
            copy.copy_(new)
        return None
    positions, values = changes
    if here is not copy:
        copy.view(-1)[positions.cpu()] = values.cpu()
    codes, width = encode_gaps(positions)
    found = EncodedDelta(tuple(new.shape), values, codes, width)
    return found if found.nbytes <= limit or not len(positions) else None


def decode(entry: BucketEntry, raw: Tensor) -> SparsePatch:
    """The patch in an entry's bytes ``raw`` (uint8 [entry.nbytes], aligned).

    Raises ``TransferFailed`` unless exactly ``entry.count`` ascending positions lie inside the
    box. Positions are a copy: a peer that still writes to ``raw`` cannot move them.
    """
    raw = inflated(entry, raw, entry.count)
    start = codes_offset(entry.count, entry.dtype)
    values = raw[: entry.count * entry.dtype.itemsize].view(entry.dtype)
    numel = entry.box.numel
    positions = decode_gaps(raw[start:], entry.sparse, entry.count, numel)
    if positions is None:
        raise TransferFailed(
            f"delta of {entry.name!r:.200}: its gaps are not those of {entry.count} positions in "
            f"{numel} elements"
        )
    whole = entry.box == Box.full(entry.shape)
    if not whole:
        positions = positions_in_whole(positions, entry.box, entry.shape)
    return SparsePatch(entry.shape, entry.dtype, positions, values, None if whole else entry.box)


def problem(entry: BucketEntry) -> str | None:
    """What is wrong with the sizes that a sparse entry announces, or None; reads no payload."""
    numel, size = entry.box.numel, entry.dtype.itemsize
    if entry.sparse not in WIDTHS:
        return f"gaps of {entry.sparse} bytes; known are 1, 2 and 4"
    if entry.count > numel:
        return f"{entry.count} changed of {numel} elements"
    if entry.count == 0:
        some = entry.nbytes or entry.inflated
        return f"{some} bytes for no change" if some else None
    if entry.inflated and entry.nbytes >= entry.inflated:
        return f"{entry.nbytes} bytes that are said to be {entry.inflated} compressed"
    nbytes = entry.inflated or entry.nbytes
    if not fit_gaps(entry, nbytes - codes_offset(entry.count, entry.dtype), numel):
        return f"{nbytes} bytes cannot hold {entry.count} changes of {size} bytes"
    return None


def fit_gaps(entry: BucketEntry, length: int, numel: int) -> bool:
    """Whether ``length`` bytes can be the gaps of the entry's positions among ``numel``."""
    escapes = length // entry.sparse - entry.count
    return length % entry.sparse == 0 and 0 <= escapes <= numel // escape(entry.sparse)


def joined(values: Tensor, offset: int, rest: Tensor, *, compress: bool) -> tuple[Tensor, int]:
    """Flat ``values`` and, from byte ``offset``, the bytes ``rest`` as they travel; and how many
    bytes that is before compression, 0 where it is not compressed.
    """
    if not len(values):
        return torch.empty(0, dtype=torch.uint8), 0
    raw, nbytes = values.view(torch.uint8), offset + len(rest)
    padding = raw.new_zeros(offset - len(raw))
    if compress and len(raw) + len(rest) >= _WORTH:
        # Bytes of equal significance side by side.
        planes = raw.view(-1, values.dtype.itemsize).T.reshape(-1)
        frame = bytearray(zstd.compress(tensor_bytes(torch.cat([planes, padding, rest]).cpu())))
        if len(frame) < nbytes:
            return torch.frombuffer(frame, dtype=torch.uint8), nbytes
    return torch.cat([raw, padding, rest]), 0


def inflated(entry: BucketEntry, raw: Tensor, count: int) -> Tensor:
    """The bytes of ``count`` values and of what follows them, as before compression; ``problem``
    has bounded their number by the tensor's own.
    """
    if not entry.inflated:
        return raw
    plain = bytearray(zstd.decompress(tensor_bytes(raw.cpu()), entry.inflated))
    found = torch.frombuffer(plain, dtype=torch.uint8)
    length = count * entry.dtype.itemsize
    found[:length] = found[:length].view(entry.dtype.itemsize, -1).T.reshape(-1)
    return found.to(raw.device)


def codes_offset(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // 4) * 4
