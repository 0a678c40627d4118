"""A lossless sparse encoding: which elements of a tensor differ from the last committed version.

Elements are compared by their bits, so a NaN equals itself and -0.0 differs from 0.0. Changed
positions are coded as gaps (``kernels/gap_codes``) in 1, 2 or 4 bytes each, whichever is
shortest. An entry's payload:

    values  count x dtype | 0..3 bytes | codes, little-endian, 1, 2 or 4 bytes each

or that, its values' bytes sorted by significance, as one zstd frame. The sender compares with a
copy that it keeps in host memory: of each rank's own shards where the source is distributed, else
of the tensors as they come. On a GPU the copy is pinned and passes through the device, tensor by
tensor: comparing, coding and reading run there. Nothing here loops over elements in Python.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.kernels import decode_gaps, diff_update, encode_gaps, nontemporal_copy
from rollout.kernels.gap_codes import WIDTHS, escape
from rollout.weight_sync.protocol import zstd
from rollout.weight_sync.protocol.messages import BucketEntry, UpdateReceipt, WeightInfo
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
    if entry.inflated:
        raw = _inflated(entry, raw)
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
    length = nbytes - codes_offset(entry.count, entry.dtype)
    escapes = length // entry.sparse - entry.count
    if length % entry.sparse or not 0 <= escapes <= numel // escape(entry.sparse):
        return f"{nbytes} bytes cannot hold {entry.count} changes of {size} bytes"
    return None


def _squeezed(raw: Tensor, dtype: torch.dtype, codes: Tensor) -> Tensor | None:
    """Values and codes as one frame, bytes of equal significance side by side; None: not tried."""
    if len(raw) + len(codes) < _WORTH:
        return None
    planes = raw.view(-1, dtype.itemsize).T.reshape(-1)
    padding = raw.new_zeros(-len(raw) % 4)
    frame = bytearray(zstd.compress(tensor_bytes(torch.cat([planes, padding, codes]).cpu())))
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


@dataclass(slots=True)
class Committed:
    """What one rank sent of the version that an engine holds, as it was sent, by (tensor, box).

    ``cut``: how the ranks' shards were cut, "" for whole tensors that one rank sent alone.
    """

    epoch: int = 0
    version: int = -1
    cut: str = ""
    since_full: int = 0  # commits since the last full one
    values: dict[tuple[str, Box], Tensor] = field(default_factory=dict)

    def is_live(self, epoch: int, version: int, cut: str = "") -> bool:
        """Whether anything was kept, and of this version."""
        kept = (self.epoch, self.version, self.cut)
        return bool(self.values) and kept == (epoch, version, cut)

    def change(self, name: str, box: Box, values: Tensor, max_bytes: int) -> EncodedDelta | None:
        """The change of a box against its copy, which becomes ``values``; None: send it whole.

        An update that then fails must drop this object.
        """
        held = self.values.get((name, box))
        if held is None or held.dtype != values.dtype:
            self.keep(name, box, values)
            return None
        return encode(held, values.contiguous(), max_bytes)

    def keep(self, name: str, box: Box, values: Tensor, into: Tensor | None = None) -> None:
        """Copy a box, ``into`` memory that is no longer needed where that is like it."""
        if into is None or into.dtype != values.dtype:
            into = torch.empty(box.shape, dtype=values.dtype, pin_memory=values.is_cuda)
        self.values[name, box] = nontemporal_copy(into, values)


class DeltaBase:
    """The last committed version of one engine, as this rank knows it: one copy in host memory.

    Belongs to whoever talks to the engine (``WeightVerbs``) and lives between updates. An update
    takes the copy out and puts it back when it has committed; one that fails leaves none, and the
    next is full. ``rest`` counts the updates for which "auto" will not try again, after it
    found that most elements change.
    """

    def __init__(self) -> None:
        self._committed: Committed | None = None
        self._lock = threading.Lock()
        self.rest = 0

    def take(self) -> Committed:
        with self._lock:
            taken, self._committed = self._committed, None
        return taken if taken is not None else Committed()

    def put(self, committed: Committed) -> None:
        with self._lock:
            self._committed = committed

    def stays(self, before: WeightInfo, receipt: UpdateReceipt) -> None:
        """A commit changed no model's weights: copies of what was live are of what is live.

        They are dropped where its version does not follow on ``before``: what other senders
        committed in between may have changed them.
        """
        with self._lock:
            copies = self._committed
            if copies is None or not copies.is_live(before.epoch, before.version, copies.cut):
                return
            if (receipt.epoch, receipt.version) != (before.epoch, before.version + 1):
                self._committed = None
            else:
                copies.version = receipt.version

    @property
    def nbytes(self) -> int:
        """Host memory held now."""
        with self._lock:
            held = self._committed.values.values() if self._committed is not None else ()
            return sum(tensor.nbytes for tensor in held)
