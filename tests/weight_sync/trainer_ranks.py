"""Trainer ranks as threads: each holds some boxes of some tensors."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import torch
from trainer import BUCKET

from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.shard_layout import PlanCache
from rollout.weights import Box, TensorMeta


def agreements(size: int) -> list[Agreement]:
    """The star of sockets that ``Agreement.over`` makes, in one process."""
    pairs = {i: socket.socketpair() for i in range(1, size)}
    ranks = tuple(range(size))
    centre = Agreement(0, ranks, {i: pair[0] for i, pair in pairs.items()})
    return [centre, *(Agreement(i, ranks, {0: pair[1]}) for i, pair in pairs.items())]


def rows(shape, rank: int, size: int) -> list[Box]:
    """What ``fully_shard`` leaves on a rank: ``torch.chunk`` of the first dimension."""
    step = -(-shape[0] // size)
    start, stop = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    box = Box((start, *(0 for _ in shape[1:])), (stop, *shape[1:]))
    return [box] if box.numel else []


def whole(shape, rank: int, size: int) -> list[Box]:
    return [Box.full(tuple(shape))]


def drifted(rank, source):
    """The last rank's copy of one tensor is another one."""
    if rank == source.agreement.size - 1:
        name = "model.norm.weight"
        source._weights = {**source._weights, name: source._weights[name] + 1}
    return source


class Boxes:
    """A ``LocalSource`` over given tensors; iterating it, which would gather, is an error."""

    def __init__(self, weights, agreement: Agreement, place=rows) -> None:
        self.agreement, self._weights = agreement, weights
        self._boxes = {
            n: place(t.shape, agreement.rank, agreement.size) for n, t in weights.items()
        }
        self.on_read: Callable[[str], None] = lambda name: None

    def metadata(self):
        return tuple(TensorMeta(n, t.dtype, tuple(t.shape)) for n, t in self._weights.items())

    def local_boxes(self):
        return list(self._boxes.items())

    def local_values(self, name):
        self.on_read(name)
        return [(box, self._weights[name][box.slices]) for box in self._boxes[name]]

    def __iter__(self):
        raise AssertionError("this update gathers")


class TrainerRanks:
    """The trainer's ranks, each with its own memory between updates."""

    def __init__(self, engine, size: int, place=rows) -> None:
        self.engine, self.size, self.place = engine, size, place
        self.plans = [PlanCache() for _ in range(size)]

    def send(self, weights, *, transport="p2p", prepare=lambda rank, source: source, **options):
        """What every rank got: a receipt or an error."""
        options = {"bucket_bytes": 32 << 10, "timeout": 10.0, **options}
        got: list = [None] * self.size

        def run(rank: int, agreement: Agreement) -> None:
            source = prepare(rank, Boxes(weights, agreement, self.place))
            try:
                got[rank] = publish(
                    source,
                    connect=lambda: self.engine,
                    options=UpdateOptions(transport=transport, **options),
                    plans=self.plans[rank],
                )
            except BaseException as error:
                got[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank, agreement))
            for rank, agreement in enumerate(agreements(self.size))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        return got


class CountedGathers(Boxes):
    """Boxes whose ranks can also gather, and say how often they did."""

    gathers = 0

    def __iter__(self):
        CountedGathers.gathers += 1
        for name, tensor in self._weights.items():
            yield name, tensor if self.agreement.is_sender else tensor.to("meta")


class DeltaTrainerRanks:
    """Trainer ranks with what each remembers between updates."""

    def __init__(self, engine, size, place=rows):
        self.engine, self.size, self.place = engine, size, place
        self.bases = [DeltaBase() for _ in range(size)]
        self.plans = [PlanCache() for _ in range(size)]

    def send(
        self, weights, *, on_read=None, link=None, links=None, of_rank=lambda rank: {},
        prepare=lambda rank, source: source, **options,
    ):  # fmt: skip
        """The receipt, which all ranks got; or the errors of all.

        ``of_rank``: options that a rank has by itself.
        """
        keywords = {
            "transport": "inline", "encoding": "delta", "bucket_bytes": BUCKET, "timeout": 10.0,
            **options,
        }  # fmt: skip
        got: list = [None] * self.size

        def run(rank, agreement):
            source = prepare(rank, CountedGathers(weights, agreement, self.place))
            if on_read is not None:
                source.on_read = lambda name: on_read(rank, name)
            try:
                got[rank] = publish(
                    source,
                    connect=lambda: links[rank] if links else link or self.engine,
                    options=UpdateOptions(**{**keywords, **of_rank(rank)}),
                    base=self.bases[rank],
                    plans=self.plans[rank],
                )
            except BaseException as error:
                got[rank] = error

        threads = [
            threading.Thread(target=run, args=(rank, agreement))
            for rank, agreement in enumerate(agreements(self.size))
        ]
        CountedGathers.gathers = 0
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        errors = [one for one in got if isinstance(one, BaseException)]
        if errors:
            assert len(errors) == self.size
            raise errors[0]
        assert all(one == got[0] for one in got)
        return got[0]


def wanted_bytes(engine) -> int:
    """The least that has to travel: what each rank takes, each element once per rank."""
    total = 0
    for rank in engine.ranks:
        for slots in rank.instances.live.table.slots.values():
            takes = {slot.take for slot in slots}
            total += sum(box.numel for box in takes) * torch.float32.itemsize
    return total
