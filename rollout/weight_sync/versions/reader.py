"""Versions in a store that outlives both sides: a trainer writes them, anybody reads them later.

    000000000012/bucket-000000     u64 length of the header | header (JSON) | padding | payload
    000000000012/bucket-000001     ...
    000000000012/manifest.json     written last: a version without it does not exist

A store needs ``put``, ``get`` and ``list`` alone: no rename, no append, no lock. What is read back
is compared with the digests in the manifest. A version may hold changes against an earlier one
(``encoding="delta"``); a reader then begins at the last whole one and patches forward. No engine
and no channel is involved: ``VersionSource`` is what an update is made from, by the usual way.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch import Tensor

from rollout.errors import (
    ChecksumMismatch,
    IncompleteUpdate,
    TransferFailed,
)
from rollout.kernels import digest
from rollout.weight_sync.protocol.bucket import Unpacked, unpack
from rollout.weight_sync.protocol.messages import BucketHeader
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.names import wire_dtype
from rollout.weight_sync.versions.store import LocalStore, Store
from rollout.weights import Box, CellPatch, SparsePatch, TensorMeta, TensorPiece
from rollout.wire.codec import MAX_DIGEST, from_plain

MANIFEST = "manifest.json"
MAX_CHAIN = 256  # versions that one reading may patch together

FORMAT = "rollout-version-3"
LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a version is; ``base`` is the version its deltas patch, None for a whole one.

    ``merged``: the adapters that its weights were merged with, by PEFT's names.
    """

    version: int
    base: int | None
    label: str | None
    merged: tuple[str, ...]
    buckets: tuple[int, ...]  # bytes of each file
    tensors: tuple[TensorMeta, ...]
    digests: dict[str, int]  # of the complete tensors


class VersionSource:
    """One complete version as a ``WeightSource``; checks every tensor against its digest.

    ``dtype``: floats are cast to it after the check (None: as written). Raises
    ``IncompleteUpdate`` where the manifest or a bucket is missing or half-written. A tensor is
    valid until the next one. Peak memory: one tensor and one bucket, times the versions that are
    patched together.
    """

    def __init__(self, store: Store, version: int, *, dtype: torch.dtype | None = None) -> None:
        self.agreement = RankGroup()
        self._store, self._dtype = store, dtype
        self.manifest = read_manifest(store, version)

    @property
    def merged_adapters(self) -> tuple[str, ...]:
        return self.manifest.merged

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(
            TensorMeta(m.name, self._cast(m.name, m.dtype), m.shape) for m in self._tensors
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in _complete(self._store, self.manifest, MAX_CHAIN):
            found = digest(tensor, tuple(tensor.shape), Box.full(tuple(tensor.shape)))
            if found != self.manifest.digests.get(name):
                raise ChecksumMismatch(
                    f"{name} of version {self.manifest.version} is not what was written: files of "
                    "it, or of a version that it is built on, are damaged, or another trainer "
                    "writes there, too: a directory is for one; write a whole version"
                )
            yield name, tensor.to(self._cast(name, tensor.dtype))

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(meta.name, [Box.full(meta.shape)]) for meta in self._tensors]

    @property
    def _tensors(self) -> tuple[TensorMeta, ...]:
        return self.manifest.tensors

    def _cast(self, name: str, dtype: torch.dtype) -> torch.dtype:
        return dtype if self._dtype is None else wire_dtype(name, dtype, self._dtype)


def read_manifest(store: Store, version: int) -> Manifest:
    """Of a complete version; ``IncompleteUpdate`` says what is missing."""
    where = f"version {version}"
    try:
        data = store.get(f"{folder(version)}/{MANIFEST}")
    except KeyError:
        raise IncompleteUpdate(f"{where} has no {MANIFEST}: it is not written yet") from None
    try:
        wire = json.loads(data)
    except ValueError as error:
        raise IncompleteUpdate(f"{where}: its {MANIFEST} is half-written: {error}") from error
    try:
        if wire["format"] != FORMAT or wire["version"] != version:
            raise TransferFailed(f"{where}: its {MANIFEST} is of {wire['format']!r:.40}")
        base = None if wire["base"] is None else int(wire["base"])
        digests = {str(name): int(value) for name, value in wire["digests"].items()}
        manifest = Manifest(
            version=version,
            base=base,
            label=None if wire["label"] is None else str(wire["label"]),
            merged=tuple(map(str, wire.get("merged", ()))),
            buckets=tuple(int(nbytes) for nbytes in wire["buckets"]),
            tensors=tuple(from_plain(TensorMeta, row) for row in wire["tensors"]),
            digests=digests,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TransferFailed(f"{where}: its {MANIFEST} is malformed: {error!r}") from error
    if base is not None and not 0 <= base < version:
        raise TransferFailed(f"{where}: it cannot patch version {base}")
    if not all(0 <= value <= MAX_DIGEST for value in digests.values()):
        raise TransferFailed(f"{where}: a digest in its {MANIFEST} is out of bounds")
    return manifest


def complete_versions(store: Store) -> list[int]:
    """Versions whose manifest is there, ascending; it may still turn out to be unreadable."""
    pattern = re.compile(rf"([0-9]{{12}})/{re.escape(MANIFEST)}")
    matches = (pattern.fullmatch(key) for key in store.list(""))
    return sorted(int(match[1]) for match in matches if match)


def bucket_key(version: int, index: int) -> str:
    return f"{folder(version)}/bucket-{index:06d}"


def folder(version: int) -> str:
    return f"{version:012d}"


def _complete(store: Store, manifest: Manifest, deep: int) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor) of a version; patches are laid over the version below it."""
    below: Iterator[tuple[str, Tensor]] | None = None
    if manifest.base is not None:
        if not deep:
            raise TransferFailed(
                f"version {manifest.version} patches too many others; write a whole one"
            )
        try:
            base = read_manifest(store, manifest.base)
        except IncompleteUpdate as error:
            raise IncompleteUpdate(
                f"version {manifest.version} holds changes to version {manifest.base}, which must "
                f"stay beside it ({error}): bring it back, or write a whole version, as the first "
                "of a VersionWriter is"
            ) from error
        below = _complete(store, base, deep - 1)
    shapes = {meta.name: meta for meta in manifest.tensors}
    for name, value in _assembled(_entries(store, manifest)):
        meta = shapes.get(name)
        if meta is None or (meta.dtype, meta.shape) != (value.dtype, tuple(value.shape)):
            raise TransferFailed(f"{name!r:.200} of version {manifest.version} is not as announced")
        # Both versions were written in one order, so the tensor below is the next one of it.
        under = next((t for n, t in below if n == name), None) if below is not None else None
        if isinstance(value, Tensor):
            yield name, value
            continue
        if under is None or tuple(under.shape) != value.shape or under.dtype != value.dtype:
            raise TransferFailed(
                f"{name} of version {manifest.version} patches a tensor that version "
                f"{manifest.base} does not have"
            )
        under.view(-1)[value.positions] = value.values
        yield name, under


def _assembled(items: Iterator[tuple[str, Unpacked]]) -> Iterator[tuple[str, Tensor | SparsePatch]]:
    """Pieces, which come one after the other, put together; else as they lie in the bucket."""
    whole: Tensor | None = None
    filled = 0
    for name, value in items:
        if isinstance(value, SparsePatch | CellPatch):
            if isinstance(value, CellPatch) or value.box is not None:
                raise TransferFailed(
                    f"{name!r:.200}: a version's changes are of elements of whole tensors"
                )
            yield name, value
        elif isinstance(value, Tensor):
            yield name, value
        else:
            if whole is None:
                whole, filled = torch.empty(value.shape, dtype=value.dtype), 0
            filled += _place(name, whole, value)
            if filled == prod(value.shape):
                yield name, whole
                whole = None
    if whole is not None:
        raise IncompleteUpdate("the last tensor's pieces are not all there")


def _place(name: str, whole: Tensor, piece: TensorPiece) -> int:
    if tuple(whole.shape) != piece.shape or whole.dtype != piece.dtype:
        raise TransferFailed(f"the pieces of {name!r:.200} are of different tensors")
    whole[piece.box.slices] = piece.values
    return piece.box.numel


def _entries(store: Store, manifest: Manifest) -> Iterator[tuple[str, Unpacked]]:
    held = bytearray()  # what was read before may be overwritten: its tensors have been taken
    data: bytes | memoryview
    for index, nbytes in enumerate(manifest.buckets):
        key = bucket_key(manifest.version, index)
        try:
            if type(store) is LocalStore:  # another one may have a ``get`` of its own
                data = store.get_over(key, held)
                held = cast(bytearray, data.obj)
            else:
                data = store.get(key)
        except KeyError:
            raise IncompleteUpdate(f"{key} is missing, though its manifest names it") from None
        if len(data) != nbytes:
            raise IncompleteUpdate(f"{key} has {len(data)} bytes, its manifest says {nbytes}")
        header, payload = _parsed(key, data)
        if header.index != index:
            raise TransferFailed(f"{key} holds bucket {header.index}")
        yield from unpack(header, payload, sparse=manifest.base is not None)


def _parsed(key: str, data: bytes | memoryview) -> tuple[BucketHeader, Tensor]:
    if len(data) < LENGTH.size:
        raise IncompleteUpdate(f"{key} is half-written")
    length = LENGTH.unpack_from(data)[0]
    start = LENGTH.size + length
    if start > len(data):
        raise IncompleteUpdate(f"{key} is half-written")
    try:
        header = from_plain(BucketHeader, json.loads(bytes(data[LENGTH.size : start])))
    except ValueError as error:
        raise TransferFailed(f"{key}: its header is malformed: {error}") from error
    if start == len(data):
        return header, torch.empty(0, dtype=torch.uint8)
    # torch wants memory that may be written
    memory = bytearray(data) if isinstance(data, bytes) else data
    return header, torch.frombuffer(memory, dtype=torch.uint8, offset=start)
