"""Buckets: bounded runs of bytes with a header, and the tensors that lie in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from rollout.errors import TransferFailed, WeightMismatch
from rollout.weight_sync.protocol.cells import decode_cells, problem_of_cells
from rollout.weight_sync.protocol.delta import decode, problem
from rollout.weight_sync.protocol.messages import NO_CELL, BucketEntry, BucketHeader
from rollout.weights import Box, CellPatch, SparsePatch, TensorPiece
from rollout.wire.frames import DTYPES

ALIGNMENT = 64  # bytes: a cache line, and more than any dtype needs
MAX_ENTRIES = 1 << 16  # per bucket
MAX_NAME = 1024
MAX_DIMS = 16
WIRE_DTYPES = frozenset(DTYPES.values())

Unpacked = Tensor | TensorPiece | SparsePatch | CellPatch


def unpack(
    header: BucketHeader, payload: Tensor, *, sparse: bool = False, inflate: int = 0
) -> Iterator[tuple[str, Unpacked]]:
    """The tensors of one bucket, as views of ``payload`` (uint8 [header.nbytes]); no copies.

    A whole tensor comes as a ``Tensor``, a part as a ``TensorPiece``, changes as a ``SparsePatch``
    or ``CellPatch`` (only if the update is ``sparse``); compressed ones may be ``inflate`` bytes
    long. The header is checked before the first view is made, coded positions before their patch
    is; raises ``TransferFailed``.
    """
    check_header(header)
    for entry in header.entries:
        if entry.sparse and not sparse:
            raise TransferFailed(f"{entry.name!r:.200}: a delta came in an update that is full")
        if entry.inflated > inflate:
            raise TransferFailed(
                f"{entry.name!r:.200}: its changes would take {entry.inflated} bytes, over the "
                f"agreed {inflate}"
            )
    if payload.dtype != torch.uint8 or payload.dim() != 1 or payload.numel() != header.nbytes:
        raise TransferFailed(
            f"bucket {header.index}: payload is {payload.dtype} {list(payload.shape)}, "
            f"expected uint8 [{header.nbytes}]"
        )
    if not payload.is_contiguous() or payload.data_ptr() % 8:
        payload = payload.clone()  # views of other dtypes need an aligned start
    return _views(header, payload)


def read_in_place(
    header: BucketHeader, regions: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor | TensorPiece]]:
    """The tensors of a bucket whose entries lie in ``regions``, as views of them: each is flat
    uint8, or the one tensor that lies there.

    Everything is checked before the first view is made: an entry that would reach beyond its
    region is a ``TransferFailed``, not a bad address.
    """
    where = f"bucket {header.index}"
    if header.nbytes or len(header.entries) > MAX_ENTRIES:
        raise TransferFailed(f"{where}: length or number of entries is out of bounds")
    for entry in header.entries:
        if wrong := _problem_in_place(entry, regions):
            raise TransferFailed(f"{where}, {entry.name!r:.200}: {wrong}")
    return _views_in_place(header, regions)


def _views_in_place(
    header: BucketHeader, regions: Sequence[Tensor]
) -> Iterator[tuple[str, Tensor | TensorPiece]]:
    for entry in header.entries:
        assert entry.region is not None
        values = regions[entry.region]
        if not _is_itself(entry, values):
            raw = values[entry.offset : entry.offset + entry.nbytes]
            values = raw.view(entry.dtype).view(entry.box.shape)
        if entry.box == Box.full(entry.shape):
            yield entry.name, values
        else:
            yield entry.name, TensorPiece(entry.shape, entry.dtype, entry.box, values)


def _views(header: BucketHeader, payload: Tensor) -> Iterator[tuple[str, Unpacked]]:
    for entry in header.entries:
        raw = payload[entry.offset : entry.offset + entry.nbytes]
        if entry.sparse:
            read = decode if entry.cell == NO_CELL else decode_cells
            yield entry.name, read(entry, raw)
            continue
        values = raw.view(entry.dtype).view(entry.box.shape)
        if entry.box == Box.full(entry.shape):
            yield entry.name, values
        else:
            yield entry.name, TensorPiece(entry.shape, entry.dtype, entry.box, values)


def check_tensor(name: str, tensor: Tensor) -> None:
    """``WeightMismatch`` for one that no bucket may hold."""
    if tensor.dtype not in WIRE_DTYPES:
        raise WeightMismatch(f"{name}: dtype {tensor.dtype} has no wire form; cast it first")
    if not name or len(name) > MAX_NAME or tensor.dim() > MAX_DIMS:
        raise WeightMismatch(f"{name!r:.80}: name or number of dimensions is out of bounds")


def check_size(header: BucketHeader, bucket_bytes: int) -> None:
    """Before memory is made: ``TransferFailed`` for more than was agreed on at begin.

    Of a round that is what each rank of the engine takes of it.
    """
    takes = [message.stop for message in header.messages] or [header.nbytes]
    if max(takes) > bucket_bytes:
        raise TransferFailed(
            f"bucket {header.index}: {max(takes)} bytes are over the agreed {bucket_bytes}"
        )


def check_header(header: BucketHeader) -> None:
    """Raise ``TransferFailed`` unless every entry lies, aligned and apart, inside the payload."""
    where = f"bucket {header.index}"
    if header.index < 0 or header.nbytes < 0 or len(header.entries) > MAX_ENTRIES:
        raise TransferFailed(f"{where}: index, length or number of entries is out of bounds")
    end = 0
    for entry in header.entries:
        problem = _problem(entry, end, header.nbytes)
        if problem:
            raise TransferFailed(f"{where}, {entry.name!r:.200}: {problem}")
        end = entry.offset + entry.nbytes


def _problem(entry: BucketEntry, end: int, length: int) -> str | None:
    if wrong := _problem_of_any(entry):
        return wrong
    if entry.region is not None:
        return "it lies elsewhere, in a bucket that carries its bytes"
    if entry.sparse:
        if wrong := problem(entry) if entry.cell == NO_CELL else problem_of_cells(entry):
            return wrong
    elif entry.nbytes != entry.box.numel * entry.dtype.itemsize:
        return f"{entry.nbytes} bytes are not {entry.box.shape} of {entry.dtype}"
    if entry.offset % ALIGNMENT:
        return f"offset {entry.offset} is not a multiple of {ALIGNMENT}"
    if entry.offset < end or entry.offset + entry.nbytes > length:
        return f"bytes {entry.offset}+{entry.nbytes} overlap or lie outside {length}"
    return None


def _problem_in_place(entry: BucketEntry, regions: Sequence[Tensor]) -> str | None:
    if wrong := _problem_of_any(entry):
        return wrong
    if entry.region is None or entry.region >= len(regions) or entry.sparse:
        return "it lies in no region of this bucket"
    region = regions[entry.region]
    if entry.nbytes != entry.box.numel * entry.dtype.itemsize:
        return f"{entry.nbytes} bytes are not {entry.box.shape} of {entry.dtype}"
    if _is_itself(entry, region):
        return None
    if region.dtype != torch.uint8 or region.dim() != 1 or not region.is_contiguous():
        return f"its region is {region.dtype} {list(region.shape)}, expected flat uint8"
    if entry.offset + entry.nbytes > region.numel():
        return f"bytes {entry.offset}+{entry.nbytes} lie outside its region of {region.numel()}"
    if entry.nbytes and (region.data_ptr() + entry.offset) % entry.dtype.itemsize:
        return f"its address is no multiple of {entry.dtype.itemsize}"
    return None


def _is_itself(entry: BucketEntry, region: Tensor) -> bool:
    """Whether the region is the tensor that the entry is about."""
    return region.dtype == entry.dtype and region.shape == entry.box.shape and not entry.offset


def _problem_of_any(entry: BucketEntry) -> str | None:
    if not entry.name or len(entry.name) > MAX_NAME:
        return "empty or overlong name"
    if entry.dtype not in WIRE_DTYPES:
        return f"dtype {entry.dtype} has no wire form"
    if len(entry.shape) > MAX_DIMS or any(n < 0 or n >= 1 << 48 for n in entry.shape):
        return f"shape {entry.shape} is out of bounds"
    if not entry.box.fits(entry.shape):
        return f"box {entry.box.starts}:{entry.box.stops} lies outside shape {entry.shape}"
    return None
