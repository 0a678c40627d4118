"""The trainer's side of versions on disk: versions written bucket by bucket, the manifest last."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from math import prod
from typing import Any

import torch
from torch import Tensor

from rollout.config import DEFAULT_BUCKET_BYTES, DEFAULT_TIMEOUT
from rollout.errors import (
    ConfigError,
    IncompleteUpdate,
    RolloutError,
    TransferFailed,
    VersionConflict,
)
from rollout.weight_sync.protocol.bucket import ALIGNMENT
from rollout.weight_sync.protocol.bucket_packer import BucketPacker
from rollout.weight_sync.protocol.committed import Committed
from rollout.weight_sync.protocol.messages import BucketHeader
from rollout.weight_sync.trainer.lockstep import Walk
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import Piece
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.trainer.transfer_stats import TransferStats
from rollout.weight_sync.trainer.watchdog import Watchdog
from rollout.weight_sync.versions.reader import (
    FORMAT,
    LENGTH,
    MANIFEST,
    MAX_CHAIN,
    Manifest,
    bucket_key,
    folder,
    read_manifest,
)
from rollout.weight_sync.versions.store import Store
from rollout.weights import CASTABLE, Box, Shape, TensorMeta
from rollout.weights.components import POLICY
from rollout.weights.wanted import WantedWeights
from rollout.wire.codec import to_json, to_plain
from rollout.wire.frames import tensor_bytes


class VersionWriter:
    """Writes versions of one model, one after the other; collective over a distributed source.

    ``dtype``: floats travel as this, so that of the engines. ``encoding`` "delta" keeps one copy
    of what was written in host memory and writes a whole version every ``anchor_every``.
    """

    def __init__(
        self,
        store: Store,
        *,
        dtype: torch.dtype,
        encoding: str = "full",
        anchor_every: int = 10,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        if not all(hasattr(store, verb) for verb in ("put", "get", "list")):
            raise ConfigError(f"store must be one, such as LocalStore(DIR), got {store!r:.80}")
        if not isinstance(dtype, torch.dtype) or dtype not in CASTABLE:
            raise ConfigError(
                f"dtype must be a dtype of plain floats, such as torch.bfloat16, got {dtype!r:.80}"
            )
        whole = type(anchor_every) is int and 1 <= anchor_every <= MAX_CHAIN
        if encoding not in ("full", "delta") or not whole:
            raise ConfigError(
                f"encoding must be full or delta and anchor_every 1..{MAX_CHAIN}, got "
                f"{encoding!r:.80} and {anchor_every!r:.80}"
            )
        self._store, self._dtype, self._bucket_bytes = store, dtype, bucket_bytes
        self._delta, self._anchor_every = encoding == "delta", anchor_every
        self._committed: Committed | None = None

    def write(
        self, obj: Any, version: int, *, label: str | None = None, timeout: float = DEFAULT_TIMEOUT
    ) -> Manifest | None:
        """Write ``obj`` (whatever ``update_weights`` takes) as ``version``.

        Returns the manifest on the rank that wrote it, None on the others; raises the same error
        on every rank. A version that is complete already is a ``VersionConflict``.
        """
        if type(version) is not int or not 0 <= version < 10**12:
            raise ConfigError(f"version must be an integer in 0..10^12 - 1, got {version!r:.80}")
        UpdateOptions(label=label, timeout=timeout)  # refuses what no update takes
        found = detect(obj)
        if found.components != (POLICY,):
            raise ConfigError(
                "a version on disk holds what goes as the policy: write that by itself, with a "
                "release's head among its tensors, as its files have it (a MegatronSource: "
                "mtp=False)"
            )
        with ExitStack() as stack:
            group = stack.enter_context(closing(found.rank_group(timeout)))
            wanted = WantedWeights(dtype=self._dtype)
            source = Incoming(found.source(wanted, group=group), wanted)
            committed, self._committed = self._committed, None
            if committed is not None and not (
                committed.version < version and committed.since_full + 1 < self._anchor_every
            ):
                committed = Committed(values=committed.values)
            writing = _Writing(self._store, version, label, self._bucket_bytes, found.merged)
            stack.callback(writing.close)
            if self._delta:
                writing.follow(committed or Committed())
            if group.is_sender:
                source.place_by(writing.buffer_for)
            _stream(source, group, writing, timeout, self._bucket_bytes)
            group.vote(_attempt(writing.finish, group), timeout, "manifest")
        if not group.is_sender:
            return None
        self._committed = writing.committed if writing.can_be_patched else None
        return writing.manifest


class _Writing:
    """One version on its way into the store."""

    def __init__(
        self,
        store: Store,
        version: int,
        label: str | None,
        bucket_bytes: int,
        merged: tuple[str, ...],
    ) -> None:
        self._store, self._version, self._label = store, version, label
        self._merged = merged
        # The store takes a bucket while the next one is gathered.
        self._thread = ThreadPoolExecutor(1, "version-writer")
        self._puts: list[Future[None]] = []  # by bucket
        self._packer = BucketPacker(
            bucket_bytes, wait_free=lambda index: self._puts[index].result()
        )
        self._sizes: list[int] = []
        self._tensors: list[TensorMeta] = []
        self._stats = TransferStats()  # of its digests alone
        self._failure: Exception | None = None  # of making room, until the next tensor
        self._base: int | None = None
        self._below: Iterator[str] = iter(())  # names of the base that a reader has yet to meet
        self.committed: Committed | None = None
        self.manifest: Manifest | None = None

    def follow(self, committed: Committed) -> None:
        """Write changes against ``committed``, if it has been written; keep what is written."""
        self.committed = committed
        if committed.version >= 0:
            self._base, self._below = (
                committed.version,
                iter([name for name, _ in committed.values]),
            )

    @property
    def can_be_patched(self) -> bool:
        """Whether what is kept is this version: one with fewer tensors is nobody's base."""
        kept = () if self.committed is None else self.committed.values
        return [meta.name for meta in self._tensors] == [name for name, _ in kept]

    def begin(self) -> None:
        with suppress(IncompleteUpdate):
            read_manifest(self._store, self._version)
            raise VersionConflict(
                f"version {self._version} has been written already: number on from the newest one "
                "there, or write into another directory"
            )

    def buffer_for(self, dtype: torch.dtype, shape: Shape) -> Tensor | None:
        """Where the next tensor may be gathered to: its bucket, unless changes alone go there."""
        if self.committed is not None or self._failure is not None:
            return None
        try:
            self._store_later(self._packer.begin(prod(shape) * dtype.itemsize))
            return self._packer.buffer_for(dtype, shape)
        except Exception as error:  # noqa: BLE001 - a source's iteration is no place for it
            self._failure = error
            return None

    def add(self, name: str, tensor: Tensor) -> None:
        if self._failure is not None:
            raise self._failure
        tensor = tensor.detach().cpu()
        shape = tuple(tensor.shape)
        box = Box.full(shape)
        self._tensors.append(TensorMeta(name, tensor.dtype, shape))
        if self.committed is None:
            self._store_later(self._packer.add(name, tensor))
            return
        # Of all of it, which may not be written.
        self._stats.digest(name, tensor, shape, box)
        change = None
        if name in self._below:  # a reader goes through both once
            change = self.committed.change(name, box, tensor, self._packer.bucket_bytes)
        else:
            self.committed.keep(name, box, tensor, self.committed.values.get((name, box)))
        if change is None:
            made = self._packer.add(name, tensor)
        else:
            made = self._packer.add_delta(name, change.coded())
        self._store_later(made)

    def finish(self) -> None:
        """The last bucket, then the manifest."""
        self._store_later(self._packer.flush())
        for put in self._puts:
            put.result()
        document = {
            "format": FORMAT,
            "version": self._version,
            "base": self._base,
            "label": self._label,
            "merged": self._merged,
            "buckets": self._sizes,
            "tensors": [to_plain(meta) for meta in self._tensors],
            "digests": self._stats.by_tensor(),
        }
        self._store.put(f"{folder(self._version)}/{MANIFEST}", json.dumps(document).encode())
        self.manifest = read_manifest(self._store, self._version)
        if self.committed is not None:
            self.committed.since_full += 0 if self._base is None else 1
            self.committed.version = self._version

    def close(self) -> None:
        """Begin no further ``put``, and wait for the one that runs."""
        self._thread.shutdown(cancel_futures=True)

    def _store_later(self, made: Iterator[tuple[BucketHeader, Tensor]]) -> None:
        for header, payload in made:
            self._puts.append(self._thread.submit(self._put, header, payload))

    def _put(self, header: BucketHeader, payload: Tensor) -> None:
        if self.committed is None:
            self._stats.digest_bucket(header, payload)
        head = to_json(header)
        head += b" " * (-(LENGTH.size + len(head)) % ALIGNMENT)
        head = LENGTH.pack(len(head)) + head
        data = tensor_bytes(payload)
        self._store.put(bucket_key(self._version, header.index), head, data)
        self._sizes.append(len(head) + len(data))


def _stream(
    source: Incoming, group: RankGroup, writing: _Writing, timeout: float, step: int
) -> None:
    """Iterate the source in lockstep; the writer's own failure waits for the next vote.

    There is a vote after every ``step`` bytes, the first rank's.
    """
    failure = _attempt(writing.begin, group)
    step = group.vote(failure, timeout, "write", {"step": step})[0]["step"]

    def take(piece: Piece) -> None:
        failure = _attempt(lambda: writing.add(piece.name, piece.values), group)
        if failure is not None:
            raise failure

    with Watchdog(group, timeout) as watch:
        Walk(source.pieces(), group, watch, timeout=timeout, step_bytes=step, take=take).run()


def _attempt(act: Any, group: RankGroup) -> RolloutError | None:
    """The error of what the sender does, the store's own included."""
    if not group.is_sender:
        return None
    try:
        act()
    except RolloutError as error:
        return error
    except OSError as error:
        return TransferFailed(f"the store failed: {error}")
    return None
