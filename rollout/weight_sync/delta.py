"""A lossless sparse encoding: which elements of a tensor differ from the last committed version.

Elements are compared by their bits, so a NaN equals itself and -0.0 differs from 0.0. Changed
positions are coded as gaps (unchanged elements before each changed one) in 1, 2 or 4 bytes each,
whichever is shortest; the largest code means "that many, and no change yet". An entry's payload:

    values  count x dtype | 0..3 bytes | codes, little-endian, 1, 2 or 4 bytes each

or that, its values' bytes sorted by significance, as one zstd frame. The sender compares with a
copy that it keeps in host memory: of each rank's own part where the source is distributed
(``shards``), else of the tensors as they come. Nothing here loops over elements in Python.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.kernels import changed
from rollout.positions import positions_in_whole
from rollout.updates import BucketEntry
from rollout.weight_sync import zstd
from rollout.weights import Box, Shape, SparsePatch
from rollout.wire import tensor_bytes

WIDTHS = (1, 2, 4)  # bytes of a gap's code
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

    @property
    def nbytes(self) -> int:
        return len(self.data)


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """The changed elements of one tensor, ready to be packed."""

    shape: Shape
    positions: Tensor  # [count] int64, ascending
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
        data, inflated = torch.empty(0, dtype=torch.uint8), 0
        if len(self.values):
            raw = self.values.view(torch.uint8)
            squeezed = _squeezed(raw, self.values.dtype, self.codes) if compress else None
            if squeezed is not None and len(squeezed) < self.nbytes:
                data, inflated = squeezed, self.nbytes
            else:
                data = torch.cat([raw, raw.new_zeros(self.codes_offset - len(raw)), self.codes])
        return CodedDelta(
            self.values.dtype, shape, box, len(self.values), self.width, data, inflated
        )


def encode(old: Tensor, new: Tensor, max_bytes: int) -> EncodedDelta | None:
    """What turns ``old`` into ``new`` (in host memory, contiguous, alike), bit for bit.

    None where that takes more than ``max_bytes`` or is no shorter than ``new`` itself. Peak extra
    memory: some 24 bytes per changed element.
    """
    size = new.dtype.itemsize
    limit = min(max_bytes, new.numel() * size - 1)
    positions = changed(old, new, limit // (size + 1))
    if positions is None:
        return None
    codes, width = encode_gaps(positions)
    found = EncodedDelta(
        tuple(new.shape), positions, new.reshape(-1)[positions], torch.from_numpy(codes), width
    )
    return found if found.nbytes <= limit or not len(positions) else None


def decode(entry: BucketEntry, raw: Tensor) -> SparsePatch:
    """The patch in an entry's bytes ``raw`` (uint8 [entry.nbytes], aligned).

    Raises ``TransferFailed`` unless exactly ``entry.count`` ascending positions lie inside the
    box. Positions are a copy: a peer that still writes to ``raw`` cannot move them.
    """
    if entry.inflated:
        raw = _inflated(entry, raw)
    start = codes_offset(entry.count, entry.dtype)
    values = raw[: entry.count * entry.dtype.itemsize].view(entry.dtype)
    codes = raw[start:].cpu().numpy()
    positions = decode_gaps(codes, entry.sparse, entry.count, entry.box.numel, entry.name)
    whole = entry.box == Box.full(entry.shape)
    if not whole:
        positions = positions_in_whole(positions, entry.box, entry.shape)
    return SparsePatch(
        entry.shape, entry.dtype, positions.to(raw.device), values, None if whole else entry.box
    )


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
    length = nbytes - codes_offset(entry.count, entry.dtype)
    escapes = length // entry.sparse - entry.count
    if length % entry.sparse or not 0 <= escapes <= numel // _escape(entry.sparse):
        return f"{nbytes} bytes cannot hold {entry.count} changes of {size} bytes"
    return None


def _squeezed(raw: Tensor, dtype: torch.dtype, codes: Tensor) -> Tensor | None:
    """Values and codes as one frame, bytes of equal significance side by side; None: not tried."""
    if len(raw) + len(codes) < _WORTH:
        return None
    planes = raw.view(-1, dtype.itemsize).T.reshape(-1)
    padding = raw.new_zeros(-len(raw) % 4)
    frame = bytearray(zstd.compress(tensor_bytes(torch.cat([planes, padding, codes]))))
    return torch.frombuffer(frame, dtype=torch.uint8)


def _inflated(entry: BucketEntry, raw: Tensor) -> Tensor:
    """The bytes before compression; ``problem`` has bounded their number by the tensor's own."""
    plain = bytearray(zstd.decompress(tensor_bytes(raw.cpu()), entry.inflated))
    found = torch.frombuffer(plain, dtype=torch.uint8)
    length = entry.count * entry.dtype.itemsize
    found[:length] = found[:length].view(entry.dtype.itemsize, -1).T.reshape(-1)
    return found.to(raw.device)


def codes_offset(count: int, dtype: torch.dtype) -> int:
    return -(-count * dtype.itemsize // 4) * 4


def encode_gaps(positions: Tensor) -> tuple[NDArray[np.uint8], int]:
    """The codes (as bytes) of ascending flat positions, and the width that is shortest for them."""
    gaps = np.diff(positions.numpy(), prepend=-1) - 1
    lengths = {w: w * (len(gaps) + int((gaps // _escape(w)).sum())) for w in WIDTHS}
    width = min(WIDTHS, key=lambda w: lengths[w])
    kind = np.dtype(f"<u{width}")
    if lengths[width] == width * len(gaps):
        return gaps.astype(kind).view(np.uint8), width
    skips = gaps // _escape(width)
    codes = np.full(lengths[width] // width, _escape(width), kind)
    codes[np.cumsum(skips + 1) - 1] = (gaps - skips * _escape(width)).astype(kind)
    return codes.view(np.uint8), width


def decode_gaps(raw: NDArray[np.uint8], width: int, count: int, numel: int, name: str) -> Tensor:
    """Flat positions, int64 [count]; ``TransferFailed`` unless they are in order and in bounds."""
    codes = raw.view(np.dtype(f"<u{width}"))
    if len(codes) > numel:
        raise TransferFailed(f"delta of {name!r:.200}: {len(codes)} codes for {numel} elements")
    ends = codes != _escape(width)
    if int(ends.sum()) != count or (count and not ends[-1]) or (not count and len(codes)):
        raise TransferFailed(f"delta of {name!r:.200}: its gaps are not those of {count} positions")
    # At most 2^48 elements (``check_header``) of at most 32 bits each, in practice far fewer.
    sums = np.cumsum(codes, dtype=np.int64)[ends]
    positions = sums + np.arange(count, dtype=np.int64)
    if count and not (int(positions[0]) >= 0 and int(positions[-1]) < numel):
        raise TransferFailed(
            f"delta of {name!r:.200}: position {int(positions[-1])} lies outside {numel} elements"
        )
    return torch.from_numpy(positions)


def _escape(width: int) -> int:
    return int((1 << 8 * width) - 1)


@dataclass(slots=True)
class Committed:
    """What one engine held after a commit: the values sent, as they were sent."""

    epoch: int = 0
    version: int = -1
    since_anchor: int = 0  # commits since the last full one
    values: dict[str, Tensor] = field(default_factory=dict)

    def is_live(self, epoch: int, version: int) -> bool:
        return bool(self.values) and (self.epoch, self.version) == (epoch, version)

    def delta(self, name: str, tensor: Tensor, max_bytes: int) -> EncodedDelta | None:
        """The change of ``name`` against its copy, which becomes ``tensor``; None: send it whole.

        ``tensor`` is in host memory. An update that then fails must drop this object.
        """
        held = self.values.get(name)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            self.keep(name, tensor)
            return None
        found = encode(held, tensor.contiguous(), max_bytes)
        if found is None:
            held.copy_(tensor)
        else:
            held.view(-1)[found.positions] = found.values
        return found

    def keep(self, name: str, tensor: Tensor) -> None:
        held = self.values.get(name)
        if held is not None and held.shape == tensor.shape and held.dtype == tensor.dtype:
            held.copy_(tensor)
        else:
            self.values[name] = torch.empty_like(
                tensor, device="cpu", memory_format=torch.contiguous_format
            ).copy_(tensor)


@dataclass(slots=True)
class ShardCopies:
    """What one trainer rank holds of a committed version: its own boxes, in the wire dtype."""

    epoch: int = 0
    version: int = -1
    layout: str = ""  # of all ranks' boxes
    since_anchor: int = 0
    values: dict[tuple[str, Box], Tensor] = field(default_factory=dict)

    def delta(self, name: str, box: Box, values: Tensor) -> EncodedDelta | None:
        """The change of a box against its copy, which becomes ``values``; None: send it whole.

        ``values``: in host memory, contiguous, shaped like the box.
        """
        held = self.values.get((name, box))
        if held is None or held.dtype != values.dtype:
            self.values[name, box] = values.clone()
            return None
        found = encode(held, values, values.nbytes)
        if found is None:
            held.copy_(values)
        else:
            held.view(-1)[found.positions] = found.values
        return found


class DeltaBase:
    """The last committed version of one engine, as its sender knows it: one copy in host memory.

    Belongs to whoever talks to the engine (``WeightVerbs``) and lives between updates. An update
    takes the copy out and puts it back when it has committed; one that fails leaves none, and the
    next is full. ``rest`` counts the updates for which "auto" will not try again, after it
    found that most elements change.
    """

    def __init__(self) -> None:
        self._committed: Committed | None = None
        self._shards: ShardCopies | None = None
        self._lock = threading.Lock()
        self.rest = 0

    def take(self) -> Committed:
        with self._lock:
            taken, self._committed = self._committed, None
        return taken if taken is not None else Committed()

    def put(self, committed: Committed) -> None:
        with self._lock:
            self._committed = committed

    def take_shards(self) -> ShardCopies:
        """The same for the copies of this rank's own part; every rank has its own."""
        with self._lock:
            taken, self._shards = self._shards, None
        return taken if taken is not None else ShardCopies()

    def put_shards(self, copies: ShardCopies) -> None:
        with self._lock:
            self._shards = copies

    @property
    def nbytes(self) -> int:
        """Host memory held now."""
        with self._lock:
            held = [*(self._committed.values.values() if self._committed is not None else ())]
            held += self._shards.values.values() if self._shards is not None else ()
            return sum(tensor.nbytes for tensor in held)
