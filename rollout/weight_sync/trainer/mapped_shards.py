"""Trainer ranks on the engine's GPUs: its ranks read what each of them holds where it lies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rollout.errors import RolloutError
from rollout.weight_sync.protocol.in_place import Given
from rollout.weight_sync.protocol.messages import BucketHeader, WeightInfo
from rollout.weight_sync.trainer.reshard import BoxRounds, within
from rollout.weight_sync.trainer.resharded_boxes import why_not_exchanged
from rollout.weight_sync.trainer.shard_layout import Lying
from rollout.weight_sync.trainer.sources.values import Incoming
from rollout.weight_sync.transports import mapping
from rollout.weight_sync.transports.cuda_handles import GivenHandles
from rollout.weight_sync.transports.cuda_ipc import CudaIpcLender, SharedAllocation
from rollout.weight_sync.transports.cuda_memory import gpu_uuid
from rollout.weights import CASTABLE, Box
from rollout.wire.codec import from_plain, to_plain

Give = Callable[[Sequence[Tensor]], Given]


def lying(source: Incoming, info: WeightInfo, ranks: Sequence[int]) -> Lying:
    """Whether the engine's ranks can read this rank's boxes where they lie, or read what trainer
    ``ranks`` bring each other; moves no byte.
    """
    here = ""
    if not (why := why_not_exchanged(ranks)):
        here = gpu_uuid(torch.device("cuda", torch.cuda.current_device()))
    return replace(_mapped(source, info), here=here, not_exchanged=why)


def _mapped(source: Incoming, info: WeightInfo) -> Lying:
    transport = mapping(info)
    if transport is None:
        return Lying()
    if (why := transport.why_not(info, None) or _why_no_boxes(info)) is not None:
        return Lying(not_mapped=why)
    try:
        handles = GivenHandles.to_look(info.reaches)
    except RolloutError as error:  # CUDA's libraries do not do it here; others send nonetheless
        return Lying(not_mapped=str(error))
    devices = set[torch.device]()
    with closing(handles):
        for name, boxes in source.local_boxes():
            held = source.held_values(name) if boxes else []
            if held is None:
                return Lying(not_mapped=f"{name} is made for the update, and stays nowhere")
            for _, values in held:
                if (why := _why_not_read(handles, values)) is not None:
                    return Lying(not_mapped=f"{name}: {why}")
                devices.add(values.device)
    if len(devices) > 1:
        return Lying(not_mapped="its tensors lie on several GPUs")
    return Lying(not_mapped=None, gpus=tuple(sorted(map(gpu_uuid, devices))))


def _why_no_boxes(info: WeightInfo) -> str | None:
    if "regions" not in info.features:
        return "the engine is of a version that maps no memory but buckets"
    if info.grid is not None and info.grid.rows > 1:
        return "rows share a scale there, which are cut apart here"
    return None


def _why_not_read(handles: GivenHandles, values: Tensor) -> str | None:
    if values.dtype not in CASTABLE:
        return f"it is of {values.dtype}, which is not cast on the way"
    return handles.why_not(values) if values.numel() else None


class MappedShards(BoxRounds):
    """Collective over the source's ranks: nothing is gathered, packed or sent.

    By the vote of bucket i every rank has digested what it holds of it, and said where that lies;
    then the first rank announces it, and the engine's ranks copy while the next are digested. What
    they read is the trainer's again when this returns or, on the first rank, when its sender has
    been closed.
    """

    def run(self, rounds: tuple[BucketHeader, ...], meet: Mapping[str, Any]) -> None:
        """Have everything read; returns when it has been, and all boxes are digested."""
        if self._first is not None:
            self._lend(rounds, self._first.give)
            return
        offer = from_plain(SharedAllocation, meet["offer"])
        with closing(CudaIpcLender(offer, meet["flags"], self._timeout)) as lender:
            try:
                self._lend(rounds, lender.give)
            except BaseException:
                lender.until_unread()
                raise

    def _lend(self, rounds: tuple[BucketHeader, ...], give: Give) -> None:
        for header in rounds:
            said = self.together(f"bucket {header.index}", partial(self._read, header, give))
            if self._first is not None:
                given = [from_plain(Given, reply["given"]) for reply in said]
                self._first.announce_given(header, given)
        self.together("last buckets", self.flush)
        self.together("digests", self.digest_rest)

    def _read(self, header: BucketHeader, give: Give) -> Mapping[str, Any]:
        """Digest this rank's boxes of a bucket, and say where its entries lie."""
        mine = [m for m in header.messages if m.src == self._group.rank]
        values: list[Tensor] = []
        boxes: dict[tuple[str, Box], Tensor] = {}
        for entry in (entry for message in mine for entry in message.entries):
            held = self._boxes.held(entry.name)
            box, part = within(held, entry)
            boxes[entry.name, box] = held[box]
            values.append(part)
        self.digest_held(boxes)
        self._stats.wire_bytes += sum(part.nbytes for part in values)
        return {"given": to_plain(give(values))}

    def digest_rest(self) -> None:
        boxes = (
            ((name, box), values)
            for name in self._boxes.undigested(self._stats)
            for box, values in self._boxes.held(name).items()
        )
        self.digest_held(dict(boxes))
