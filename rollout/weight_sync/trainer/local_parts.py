"""Each trainer rank's own part of an update, and what changed of it, found where it lies.

A rank compares its boxes with copies of them; what changed (or a box whole, where that is
shorter) goes to the first rank, which packs it as it comes and sends it by any transport, or
straight to the engine where each rank has a stream. A box that several ranks hold is cut into as
many parts, one each. Nothing is gathered whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from rollout.errors import RolloutError, SourceFailed
from rollout.kernels import nontemporal_copy
from rollout.weight_sync.protocol.delta import CodedDelta, EncodedDelta, ShardCopies
from rollout.weight_sync.protocol.digests import total
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.lanes import Outlet
from rollout.weight_sync.trainer.lockstep import Watchdog, source_failed
from rollout.weight_sync.trainer.options import UpdateOptions
from rollout.weight_sync.trainer.rank_group import Agreement
from rollout.weight_sync.trainer.reshard_plan import held
from rollout.weight_sync.trainer.session import Publication
from rollout.weight_sync.trainer.sources.base import LocalSource, WeightSource
from rollout.weight_sync.trainer.survey import MAX_PART, Survey, shard_layout
from rollout.weights import Box, TensorMeta, TensorPiece
from rollout.weights.box import cut
from rollout.wire.frames import flat_bytes

_WHOLE = -1  # in place of a count: the values of the box, all of them


@dataclass(frozen=True, slots=True)
class Part:
    """``box`` is this rank's to send; it lies in ``of``, which the rank holds."""

    of: Box
    box: Box


class Shards:
    """One trainer rank's parts of a source, and its copies of them."""

    def __init__(
        self,
        source: WeightSource,
        survey: Survey,
        rank: int,
        bucket_bytes: int,
        watch: Watchdog | None = None,
    ) -> None:
        self._source, self._watch = cast(LocalSource, source), watch
        self._metadata, most = survey.metadata, min(bucket_bytes, MAX_PART)
        self.layout = shard_layout(survey.layout, bucket_bytes)
        self._parts = {m.name: _parts(m, survey, rank, most) for m in survey.metadata}

    def read(self, names: Iterable[str]) -> Iterator[tuple[TensorMeta, Box, Tensor]]:
        """The values of this rank's parts, contiguous in host memory."""
        wanted = set(names)
        for meta in self._metadata:
            parts = self._parts[meta.name]
            if meta.name not in wanted or not parts:
                continue
            with self._watch.over(f"read {meta.name}") if self._watch else nullcontext():
                held_now = dict(self._source.local_values(meta.name))
            for part in parts:
                values = held_now.get(part.of)
                if values is None or tuple(values.shape) != part.of.shape:
                    raise SourceFailed(f"{meta.name}: the source no longer holds {part.of}")
                back = tuple(-start for start in part.of.starts)
                piece = values.detach()[part.box.shifted(back).slices]
                yield meta, part.box, piece.cpu().to(meta.dtype).contiguous()

    def keep(self, copies: ShardCopies) -> None:
        """Copy every part: the base of the next delta."""
        found = {}
        for meta, box, values in self.read(meta.name for meta in self._metadata):
            into = copies.values.get((meta.name, box))
            if into is None or into.dtype != values.dtype:
                into = torch.empty_like(values)
            found[meta.name, box] = nontemporal_copy(into, values)
        copies.values, copies.layout = found, self.layout

    def batches(self, most: int) -> Iterator[tuple[str, ...]]:
        """The names of all tensors in order, in runs of about ``most`` bytes; alike on all."""
        names: list[str] = []
        size = 0
        for meta in self._metadata:
            names.append(meta.name)
            size += meta.nbytes
            if size >= most:
                yield tuple(names)
                names, size = [], 0
        if names:
            yield tuple(names)


class ShardUpdate:
    """One update by parts; collective over the source's ranks, which go on or fail together.

    ``copies``: what changes are found against; None: parts go whole. ``outlet``: this rank's own
    stream; None: the first rank sends for all.
    """

    def __init__(
        self,
        shards: Shards,
        copies: ShardCopies | None,
        info: WeightInfo,
        agreement: Agreement,
        options: UpdateOptions,
        sending: Publication,
        outlet: Outlet | None,
        compress: bool,
    ) -> None:
        self._shards, self._copies, self._outlet = shards, copies, outlet
        self._agreement, self._sending, self._compress = agreement, sending, compress
        self._aliases, self._options = info.aliases, options

    def run(self, metadata: Sequence[TensorMeta]) -> None:
        """Send everything; returns when it has arrived and all digests are known."""
        timeout, books = 2 * self._options.timeout, self._sending.books
        for turn, names in enumerate(self._shards.batches(self._options.bucket_bytes)):
            phase = f"parts {turn}"
            if self._outlet is None:
                self._through_first(names, metadata, phase)
            else:
                self._directly(self._outlet, names, phase)
        end = self._outlet or self._sending.shipment
        if end is not None:
            end.flush()
        self._agreement.vote(None if end is None else end.failure, timeout, "end of parts")
        status = {"digests": books.digests, "sent": None if end is None else end.sent()}
        said = self._agreement.exchange(status, timeout, "digests")
        sent = [reply["sent"] for reply in said if reply["sent"] is not None]
        buckets, wire, changed = zip(*sent, strict=True)
        each = () if self._outlet is None else wire
        books.end(metadata, _summed(reply["digests"] for reply in said), each)
        books.num_buckets, books.changed = sum(buckets), sum(changed)

    def _directly(self, outlet: Outlet, names: Sequence[str], phase: str) -> None:
        """This rank's parts of one run, on its own stream."""
        error: RolloutError | None = None
        started = time.perf_counter()
        try:
            for meta, box, values, delta in self._compared(names):
                part: CodedDelta | TensorPiece
                if delta is None:
                    part = TensorPiece(meta.shape, meta.dtype, box, values)
                else:
                    part = delta.coded(meta.shape, box, compress=self._compress)
                self._sending.books.gather_seconds += time.perf_counter() - started
                outlet.add_part(meta.name, part)
                started = time.perf_counter()
        except RolloutError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - the trainer's code runs in here, too
            error = source_failed(failure, "")
        self._agreement.vote(error or outlet.failure, 2 * self._options.timeout, phase)

    def _through_first(
        self, names: Sequence[str], metadata: Sequence[TensorMeta], phase: str
    ) -> None:
        """All ranks' parts of one run, through the first one."""
        timeout = 2 * self._options.timeout
        numbers = {meta.name: i for i, meta in enumerate(metadata)}
        error: RolloutError | None = None
        coded: tuple[list[list[Any]], Tensor] = ([], torch.empty(0, dtype=torch.uint8))
        started = time.perf_counter()
        try:
            coded = self._coded(names, numbers)
        except RolloutError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - the trainer's code runs in here, too
            error = source_failed(failure, "")
        self._agreement.vote(error or self._sending.failure, timeout, phase)
        frames = self._agreement.collect(*coded, timeout, phase)
        self._sending.books.gather_seconds += time.perf_counter() - started
        for rows, data in frames:
            self._send(rows, data, metadata)

    def _compared(
        self, names: Sequence[str]
    ) -> Iterator[tuple[TensorMeta, Box, Tensor, EncodedDelta | None]]:
        """This rank's parts of some tensors, digested; and what changed, or None: all of it."""
        for meta, box, values in self._shards.read(names):
            self._sending.books.digest(meta.name, values, meta.shape, box)
            # An alias is compared with its owner by the engine: it goes whole, and is not kept.
            if self._copies is None or meta.name in self._aliases:
                yield meta, box, values, None
            else:
                yield meta, box, values, self._copies.delta(meta.name, box, values)

    def _coded(
        self, names: Sequence[str], numbers: Mapping[str, int]
    ) -> tuple[list[list[Any]], Tensor]:
        """This rank's changes in the tensors of one run: a row per part, and its bytes."""
        rows: list[list[Any]] = []
        blobs: list[Tensor] = []
        for meta, box, values, delta in self._compared(names):
            where = [numbers[meta.name], list(box.starts), list(box.stops)]
            if delta is None:
                blob = flat_bytes(values)
                rows.append([*where, _WHOLE, 0, len(blob), 0])
            else:
                change = delta.coded(meta.shape, box, compress=self._compress)
                blob = change.data
                rows.append([*where, change.count, change.width, len(blob), change.inflated])
            blobs += [blob, blob.new_zeros(-len(blob) % 8)]
        return rows, torch.cat(blobs) if blobs else torch.empty(0, dtype=torch.uint8)

    def _send(self, rows: Sequence[Any], data: Tensor, metadata: Sequence[TensorMeta]) -> None:
        """On the sender: what one rank said, into buckets as it is."""
        shipment, at = self._sending.shipment, 0
        assert shipment is not None
        for number, starts, stops, count, width, nbytes, inflated in rows:
            meta, box = metadata[number], Box(tuple(starts), tuple(stops))
            blob = data[at : at + nbytes]
            at += -(-nbytes // 8) * 8
            if count == _WHOLE:
                values = blob.view(meta.dtype).view(box.shape)
                shipment.add_part(meta.name, TensorPiece(meta.shape, meta.dtype, box, values))
            else:
                shipment.add_part(
                    meta.name,
                    CodedDelta(meta.dtype, meta.shape, box, count, width, blob, inflated),
                )


def _parts(meta: TensorMeta, survey: Survey, rank: int, most: int) -> tuple[Part, ...]:
    """What ``rank`` sends of a tensor: its boxes, shared with the ranks that hold them too."""
    elements = max(1, most // meta.dtype.itemsize)
    found: list[Part] = []
    for box, ranks in held(meta.name, survey.have).items():
        if rank not in ranks:
            continue
        share = min(elements, -(-box.numel // len(ranks)))
        found += [
            Part(box, part)
            for turn, part in enumerate(cut(box, max(1, share)))
            if ranks[turn % len(ranks)] == rank
        ]
    return tuple(found)


def _summed(digests: Iterable[Mapping[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in digests:
        for name, value in one.items():
            found[name] = total([found.get(name, 0), value])
    return found
