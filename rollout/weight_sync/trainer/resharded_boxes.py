"""Trainer ranks on the engine's GPUs exchange boxes, and lend each engine rank what it wants."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollout.errors import TransferFailed
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader, Message
from rollout.weight_sync.trainer.reshard import BoxRounds, place
from rollout.weight_sync.trainer.reshard_plan import aligned
from rollout.weight_sync.transports.cuda_handles import GivenHandles
from rollout.weight_sync.transports.cuda_memory import whole_pages
from rollout.weight_sync.transports.cuda_reshard import ReshardOffer
from rollout.weight_sync.transports.lent_memory import LentMemory
from rollout.weights import Box
from rollout.wire.codec import from_plain

_POLL = 20e-6  # seconds


def why_not_exchanged(ranks: Sequence[int]) -> str:
    """Why these ranks of the trainer's job bring each other no boxes between GPUs; "": they do."""
    if not torch.cuda.is_available():
        return "it has no GPU"
    if not dist.is_initialized():
        return "it is in no job of torch.distributed"
    if tuple(ranks) != tuple(range(dist.get_world_size())):
        return "its source is of a part of the trainer's job"
    backends = dist.get_backend_config()
    if "cuda:nccl" not in backends.split(","):
        return f"its job exchanges nothing between GPUs: its backends are {backends}"
    return ""


class ReshardedBoxes(BoxRounds):
    """Collective over the source's ranks, by the trainer's own group of GPUs.

    By the vote of round i it has been exchanged, what is exchanged next is packed, and round i - 1
    has been taken by every engine rank, so that the half it was in may be written again; then the
    first rank announces round i.
    """

    _sent_bytes = 0

    def run(self, rounds: tuple[BucketHeader, ...], meet: Mapping[str, Any]) -> None:
        """Bring everything; returns when it has been taken and all boxes are digested."""
        self._relays: Sequence[int] = meet["relays"]
        offer = from_plain(ReshardOffer, meet["offer"])
        with ExitStack() as stack:
            said = self.together("memory", partial(self._lend, rounds, offer.secret, stack))
            handles = tuple(said[relay]["handle"] for relay in self._relays)
            self.together("connect", self._connect)
            self.together("first round", partial(self._pack, rounds[0] if rounds else None))
            for header, following in zip(rounds, (*rounds[1:], None), strict=True):
                act = partial(self._bring, header, following)
                self.together(f"round {header.index}", act)
                if self._first is not None:
                    told = replace(header, regions=handles)
                    self._first.announce(told, torch.empty(0, dtype=torch.uint8))
            self.together("last rounds", self.flush)
            self.together("digests", self.digest_rest)
            self._stats.wire_bytes = self._sent_bytes

    def _lend(
        self, rounds: tuple[BucketHeader, ...], secret: str, stack: ExitStack
    ) -> Mapping[str, Any]:
        """Two buffers to send from, and, on a relay, the memory to receive in."""
        device = torch.device("cuda", torch.cuda.current_device())
        most = max((sum(self._leaving(header)) for header in rounds), default=0)
        try:
            self._packed = torch.empty((2, most), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise TransferFailed(
                f"there is no room on {device} to send {most} bytes from twice: lower bucket_bytes"
            ) from error
        self._memory: LentMemory | None = None
        serves = self._relays.count(self._group.rank)
        if not serves:
            return {}
        handles = GivenHandles(secret)
        stack.callback(handles.close)
        half = whole_pages(max([1, *(sum(self._coming(header)) for header in rounds)]))
        self._memory = memory = LentMemory(half, serves, handles)
        stack.callback(memory.close)
        return {"handle": memory.handle}

    def _connect(self) -> None:
        if self._first is not None:
            self._first.connect()

    def _pack(self, header: BucketHeader | None) -> None:
        """What this rank sends of a round: by relay, then by engine rank."""
        if header is None:
            return
        started = time.perf_counter()
        wanted: dict[str, list[tuple[BucketEntry, int]]] = {}
        end = 0
        for message in self._sent(header):
            for entry in message.entries:
                where = end + entry.offset - message.start
                wanted.setdefault(entry.name, []).append((entry, where))
            end += aligned(message.nbytes)
            self._sent_bytes += message.nbytes
        into = self._packed[header.index % 2]
        with self._watch.over(f"read round {header.index}"):
            stay = {name: self._boxes.held(name) for name in wanted if self._boxes.stays(name)}
            self._digest_at_once(stay)
            for name, held in stay.items():
                place(held, wanted.pop(name), into)
        self.write(wanted, into)
        self._stats.gather_seconds += time.perf_counter() - started

    def _digest_at_once(self, stay: Mapping[str, Mapping[Box, Tensor]]) -> None:
        """What stays, by device; of other tensors only one is there at a time."""
        by_device: dict[torch.device, dict[tuple[str, Box], Tensor]] = {}
        for name, held in stay.items():
            for box, values in held.items():
                by_device.setdefault(values.device, {})[name, box] = values
        for boxes in by_device.values():
            self.digest_held(boxes)

    def _bring(self, header: BucketHeader, following: BucketHeader | None) -> None:
        leaving, coming = self._leaving(header), self._coming(header)
        payload = self._packed[header.index % 2][: sum(leaving)]
        memory, into = self._memory, payload[:0]
        if memory is not None:
            into = memory.halves[header.index % 2][: sum(coming)]
        with self._watch.over(f"begin exchange {header.index}"):  # the first one meets its peers
            work = exchange(into, payload, coming, leaving)
        if memory is not None:
            memory.written_by = work
        self._pack(following)
        with self._watch.over(f"exchange round {header.index}"):
            while not work.is_completed():
                self._watch.check()
                time.sleep(_POLL)
            work.wait()
            if into.is_cuda:  # what is announced has to be there
                torch.cuda.current_stream(into.device).synchronize()
        if self._first is not None and header.index:
            self._first.taken(header.index - 1)

    def _sent(self, header: BucketHeader) -> list[Message]:
        mine = (message for message in header.messages if message.src == self._group.rank)
        return sorted(mine, key=lambda one: (self._relays[one.dst], one.dst))

    def _leaving(self, header: BucketHeader) -> list[int]:
        """Bytes for each of the trainer's ranks."""
        sizes = [0] * self._group.size
        for message in self._sent(header):
            sizes[self._relays[message.dst]] += aligned(message.nbytes)
        return sizes

    def _coming(self, header: BucketHeader) -> list[int]:
        """Bytes from each of the trainer's ranks."""
        sizes = [0] * self._group.size
        for message in header.messages:
            if self._relays[message.dst] == self._group.rank:
                sizes[message.src] += aligned(message.nbytes)
        return sizes


def exchange(into: Tensor, payload: Tensor, coming: list[int], leaving: list[int]) -> Any:
    """The work that brings each rank of the trainer's job its part of the payload, uint8, and this
    rank what ``coming`` says of each; collective.
    """
    try:
        return dist.all_to_all_single(into, payload, coming, leaving, async_op=True)
    except RuntimeError as error:  # torch's own of NCCL
        raise TransferFailed(f"the trainer's ranks cannot exchange boxes: {error}") from error
