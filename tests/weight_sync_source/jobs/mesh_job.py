"""Hybrid sharding and tensor parallelism on a mesh of two by two ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from weight_sync_source.jobs.rank import TIMEOUT, Rank
from weight_sync_source.jobs.tiny import Tiny

from rollout.errors import DeadlineExceeded
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.update import detect_update
from rollout.weights.wanted import WantedWeights

BF16 = torch.bfloat16


class WeightWithDynamicFloat8CastTensor(torch.Tensor):
    """As torchao's float8 training has it around a shard; what is not its own tensor's fails."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made._tensor = inner
        return made

    def __tensor_flatten__(self) -> Any:
        return ["_tensor"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func in (torch.ops.aten.view.default, torch.ops.aten.detach.default), func
        return cls(args[0]._tensor)


def wrapped(model: torch.nn.Module) -> dict[str, DTensor]:
    return {
        name: DTensor.from_local(
            WeightWithDynamicFloat8CastTensor(shard.to_local().detach()),
            shard.device_mesh, shard.placements, run_check=False,
            shape=shard.shape, stride=shard.stride(),
        )
        for name, shard in model.state_dict().items() if isinstance(shard, DTensor)
    }  # fmt: skip


def sharded(model: Tiny, mesh: DeviceMesh) -> Tiny:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(mesh: DeviceMesh, hidden: int) -> Tiny:
    model = Tiny(tied=False, hidden=hidden)
    plan = {"up_proj": ColwiseParallel(), "down_proj": RowwiseParallel()}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["inner"], plan)
    return sharded(model, mesh["outer"])


def flat(mesh: DeviceMesh) -> FullyShardedDataParallel:
    settings = {
        "device_id": torch.device("cpu"), "use_orig_params": True, "device_mesh": mesh,
        "sharding_strategy": ShardingStrategy.HYBRID_SHARD,
    }  # fmt: skip
    model = Tiny()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FullyShardedDataParallel(layer, **settings)
    return FullyShardedDataParallel(model, **settings)


if __name__ == "__main__":
    job = Rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    job.gather("hsdp", sharded(Tiny(), mesh), BF16)
    untied = sharded(Tiny(tied=False), mesh)
    job.gather("float8", {**untied.state_dict(), **wrapped(untied)}, BF16)
    job.gather("fsdp1_hybrid", flat(mesh), BF16)
    job.gather("tp", tensor_parallel(mesh, 12), BF16)
    job.gather("tp_uneven", tensor_parallel(mesh, 10), BF16)
    line = init_device_mesh("cpu", (4,))
    part = torch.randn(6, 4, generator=torch.Generator().manual_seed(job.rank))
    job.gather("summed", {"a.weight": DTensor.from_local(part, line, [Partial()])}, BF16)
    pair = DeviceMesh("cpu", [2, 3])
    spread = {
        "a.weight": distribute_tensor(torch.ones(6, 4), line, [Shard(0)]),
        "b.weight": distribute_tensor(torch.ones(6, 4), pair, [Shard(0)]),
    }
    source = detect_update(spread, {}).source(WantedWeights(dtype=BF16), timeout=TIMEOUT)
    job.failing("elsewhere", source.agreement, source, lambda index: None)
    if job.rank != 2:
        try:
            RankGroup.over(range(4), 1.0)
        except DeadlineExceeded as error:
            job.outcome["absent"] = str(error)
    job.finish()
    dist.barrier()
    dist.destroy_process_group()
