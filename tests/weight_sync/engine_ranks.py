"""Ranks of one engine as threads of this process: real models, real updates, no generation.

Each rank has a main queue and a staging queue, as a worker has; all ranks see all calls in one
order. ``Engine`` is what a coordinator is given, with the clock of steps left out.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import torch
from torch import Tensor

from rollout.distributed import TensorParallel
from rollout.engine.adapters.table import AdapterTable
from rollout.engine.serving_lease import ServingLease
from rollout.engine.updates.coordinator import Coordinator
from rollout.engine.updates.lease import Lease
from rollout.engine.updates.rollback import roll_back
from rollout.engine.updates.served_weights import ServedWeights
from rollout.engine.worker.rank_updates import RankUpdates
from rollout.engine.worker.weight_instances import ModelInstances
from rollout.models.build import build_model
from rollout.models.components import ComponentModels
from rollout.models.config.model import ModelConfig
from rollout.weight_sync.protocol.digests import slot_rows
from rollout.weight_sync.protocol.messages import QuantizationGrid, held_as
from rollout.weights.wanted import WantedWeights, by_name


class Rank:
    def __init__(
        self,
        config: ModelConfig,
        rank: int,
        size: int,
        weights,
        layout: str,
        undo: str,
        pinned: bool,
        beside: Mapping[str, Any],
        quantization: str,
    ) -> None:
        tp = TensorParallel(rank, size)
        live = build_model(config, tp, torch.float32, "cpu", layout, quantization=quantization)
        live.load_weights(weights.items())
        if beside:
            others = {n: build_model(config, tp, torch.float32, "cpu", layout) for n in beside}
            for name, model in others.items():
                model.load_weights(beside[name].items())
            live = ComponentModels(live, others)
        self.instances = ModelInstances(
            live, lambda device: live.empty_like(), live.build.device, undo, pinned=pinned
        )
        self.updates = RankUpdates(self.instances, rank, "cpu")
        self.version = 0
        self.fail_commit = False
        self.read = 0  # how often it was read inside a commit
        self.main: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.staging: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.threads = [
            threading.Thread(target=self._serve, args=(q,), daemon=True)
            for q in (self.main, self.staging)
        ]
        for thread in self.threads:
            thread.start()

    def _serve(self, tasks: queue.SimpleQueue[Any]) -> None:
        while (task := tasks.get()) is not None:
            method, args, tensors, future = task
            try:
                future.set_result((getattr(self, method)(args, tensors), {}))
            except BaseException as error:
                future.set_exception(error)

    def stage_begin(self, args, tensors):
        return self.updates.begin(args)

    def stage_connect(self, args, tensors):
        return self.updates.connect(args)

    def stage_bucket(self, args, tensors):
        return self.updates.bucket(args, tensors)

    def stage_seal(self, args, tensors):
        return self.updates.seal(args)

    def stage_abort(self, args, tensors):
        return self.updates.abort(args)

    def stage_restore(self, args, tensors):
        return self.updates.restore()

    def stage_digests(self, args, tensors):
        rows = slot_rows(self.instances.reader.digest_slots(live=True))
        return {"digests": rows, "versions": [self.version, self.version]}

    def digests(self, args, tensors):
        self.read += 1
        return self.stage_digests(args, tensors)

    def interrupt_update(self, args, tensors):
        self.updates.interrupt(args["update_id"])
        return {}

    def commit(self, args, tensors):
        if self.fail_commit:
            raise RuntimeError("the commit was made to fail")
        moved = self.instances.go_back() if args["back"] else self.instances.commit()
        self.version = args["version"]
        return {"moved": moved}

    def revert(self, args, tensors):
        if self.version != args["version"]:
            self.instances.revert()
            self.version = args["version"]
        return {}

    def live(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.instances.live.named_parameters()}


class Engine:
    """The ranks, and what a coordinator needs of the engine around them."""

    def __init__(
        self,
        config: ModelConfig,
        size: int,
        weights,
        layout: str = "plain",
        undo: str = "shadow",
        pinned: bool = False,
        beside: Mapping[str, Any] | None = None,
        quantization: str = "none",
    ) -> None:
        self.ranks = [
            Rank(config, r, size, weights, layout, undo, pinned, beside or {}, quantization)
            for r in range(size)
        ]
        self.epoch, self.version, self.broken = 7, 0, None
        self.leaving, self.served = False, None
        self.serving = ServingLease()
        self.control = self.counters = self.pins = self
        self.is_served = True
        self.since, self.told = -1, ""  # nothing is ever pinned here
        self.one_host = True
        self.adapters = AdapterTable(0, tuple)
        self.committed: list[tuple[int, str]] = []
        self.ended: list[bool] = []  # one per update: whether it failed
        self.held = False
        self.gates: list[str] = []  # what updates did to generation
        self._order = threading.Lock()
        model = self.ranks[0].instances.live
        quantized = tuple(dict.fromkeys(slot.source for slot in model.table.quantized))
        grid = QuantizationGrid.of(quantization)
        tensors = by_name(model.weight_metadata())
        served = ServedWeights(
            wanted=WantedWeights(
                dtype=next(iter(tensors.values())).dtype,
                tensors=tensors,
                aliases=model.table.aliases,
                prefixes=model.table.prefixes,
                schemes=held_as(grid, quantized),
            ),
            device="cpu",
            tensor_parallel_size=size,
            undo=undo,
            quantized=quantized,
            grid=grid,
        )
        self.coordinator = Coordinator(self, served)

    def info(self):
        return self.coordinator.info()

    def open(self):
        return Lease(self.coordinator)

    def rollback(self, timeout: float):
        return roll_back(self.coordinator, timeout)

    def receipts(self):
        return self.coordinator.receipts

    local_address = "127.0.0.1"
    state, parked = "running", False
    joins = False
    reads_on = ""  # where the rank in the trainer's own process runs

    def digests(self, timeout: float):
        return self.coordinator.digests(timeout)

    def call(
        self, method: str, args: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None
    ) -> list[Future[Any]]:
        with self._order:
            return [self._enqueue(rank, method, args, tensors or {}) for rank in self.ranks]

    def _enqueue(self, rank: Rank, method: str, args, tensors) -> Future[Any]:
        future: Future[Any] = Future()
        tasks = rank.staging if method.startswith("stage_") else rank.main
        tasks.put((method, args, tensors, future))
        return future

    def buffer(self, nbytes):
        return None

    def at_step_boundary(self, fn: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn())
        except BaseException as error:
            future.set_exception(error)
        return future

    @property
    def base_version(self) -> int:
        return self.version

    def wait(self, seconds: float) -> bool:
        return True

    def on_commit(
        self, version: int, in_flight: str, pin: Any = None, *, name, models: bool = True, **_
    ) -> None:
        name(version)
        self.version = version
        if models:
            self.broken = None
        self.committed.append((version, in_flight))

    def drain(self, timeout: float) -> None:
        self.gates.append("drain")

    def undrain(self) -> None:
        self.gates.append("undrain")

    def hold(self, timeout: float) -> None:
        self.held = True
        self.gates.append("hold")

    def release(self) -> None:
        self.held = False
        self.gates.append("release")

    def mark_broken(self, reason: str | None) -> None:
        self.broken = reason

    def record_nonfinite(self) -> None: ...

    def record_update(self, stall: float) -> None:
        self.ended.append(False)

    def record_failed_update(self, update_id: str, reason: str) -> None:
        self.ended.append(True)

    def live(self) -> list[dict[str, Tensor]]:
        return [rank.live() for rank in self.ranks]

    def close(self) -> Iterator[None] | None:
        for rank in self.ranks:
            rank.main.put(None)
            rank.staging.put(None)
        for rank in self.ranks:
            for thread in rank.threads:
                thread.join(10)
                assert not thread.is_alive()
        return None


def same(a: list[dict[str, Tensor]], b: list[dict[str, Tensor]]) -> bool:
    return all(
        x.keys() == y.keys() and all(torch.equal(x[n], y[n]) for n in x)
        for x, y in zip(a, b, strict=True)
    )
