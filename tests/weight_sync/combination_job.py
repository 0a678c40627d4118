"""One rank of a trainer job that holds one model under several kinds of sharding at once.

    python combination_job.py RANK WORLD PORT DIRECTORY KIND[,KIND ...]

Obeys JSON lines on stdin: {"kind", "change", "address", "transport", "encoding", "timeout",
"bucket_bytes"}. Applies the change to its own shards, updates the service, and answers with the
receipt or the error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM
from weight_changes import CHANGES

from rollout import RolloutError
from rollout.rpc.client import RolloutClient
from rollout.weight_sync.protocol.committed import DeltaBase
from rollout.weight_sync.trainer.publisher import UpdateOptions, publish
from rollout.weight_sync.trainer.shard_layout import PlanCache
from rollout.wire.codec import to_plain

COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj")
ROWS = ("self_attn.o_proj", "mlp.down_proj")


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def fsdp2(model: nn.Module, mesh: Any = None) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp1(model: nn.Module, **settings: Any) -> nn.Module:
    settings = {"device_id": torch.device("cpu"), "use_orig_params": True, **settings}
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FullyShardedDataParallel(layer, **settings)
    return FullyShardedDataParallel(model, **settings)


def hsdp(model: nn.Module) -> nn.Module:
    return fsdp2(model, two_by_two())


def fsdp1_hybrid(model: nn.Module) -> nn.Module:
    hybrid = ShardingStrategy.HYBRID_SHARD
    return fsdp1(model, sharding_strategy=hybrid, device_mesh=two_by_two())


def fsdp2_tp(model: nn.Module) -> nn.Module:
    mesh = two_by_two()
    plan = {name: ColwiseParallel() for name in COLUMNS}
    plan |= {name: RowwiseParallel() for name in ROWS}
    for layer in model.model.layers:
        parallelize_module(layer, mesh["inner"], plan)
    return fsdp2(model, mesh["outer"])


def two_by_two() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))


def zero(model: nn.Module, stage: int) -> Any:
    import deepspeed

    # Its shared-memory collective would be compiled with g++ first; gloo does the same.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def zero3(model: nn.Module) -> Any:
    return zero(model, 3)


def zero2(model: nn.Module) -> Any:
    return zero(model, 2)


def zero1(model: nn.Module) -> Any:
    return zero(model, 1)


KINDS: dict[str, Callable[[nn.Module], Any]] = {
    make.__name__: make
    for make in (
        ddp, fsdp2, fsdp1, zero1, zero2, zero3, hsdp, fsdp1_hybrid, fsdp2_tp,
    )
}  # fmt: skip


def shards(trainer: Any) -> Iterator[Tensor]:
    """What this rank holds of every parameter, to be changed in place."""
    for parameter in trainer.parameters():
        if isinstance(parameter, DTensor):
            yield parameter.to_local()
        else:
            yield getattr(parameter, "ds_tensor", parameter.data)


#: what a trainer passes every other time, in place of its model: the same weights as DTensors
FORMS: dict[str, Callable[[nn.Module], Any]] = {
    "fsdp2": lambda model: model.state_dict(),
    "hsdp": lambda model: list(model.state_dict().items()),
    "fsdp2_tp": lambda model: model.named_parameters(),
}


class Held:
    """One trainer on this rank, and what it remembers of each service."""

    def __init__(self, kind: str, directory: str) -> None:
        self.trainer = KINDS[kind](AutoModelForCausalLM.from_pretrained(directory))
        self.forms = cycle([lambda model: model, FORMS.get(kind, lambda model: model)])
        self.memory: dict[str, tuple[DeltaBase, PlanCache]] = {}

    def update(self, ask: dict[str, Any]) -> dict[str, Any]:
        with torch.no_grad():
            for shard in shards(self.trainer):
                shard.copy_(CHANGES[ask["change"]](shard))
        client = RolloutClient(ask["address"], timeout=ask["timeout"])
        base, plans = self.memory.setdefault(ask["address"], (DeltaBase(), PlanCache()))
        options = UpdateOptions(
            **{name: ask[name] for name in ("transport", "encoding", "timeout", "bucket_bytes")}
        )
        try:
            source = next(self.forms)(self.trainer)
            receipt = publish(
                source, connect=lambda: client, options=options, base=base, plans=plans
            )
            return {"receipt": to_plain(receipt)}
        except RolloutError as error:
            return {"error": type(error).__name__, "message": str(error)}
        finally:
            client.close()


def main() -> None:
    rank, world, port, directory = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print must not mix with the answers
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    held = {kind: Held(kind, directory) for kind in sys.argv[5].split(",")}
    print(json.dumps({"ready": rank}), file=answers, flush=True)
    for line in sys.stdin:
        ask = json.loads(line)
        if ask.get("op") == "end":
            break
        print(json.dumps(held[ask["kind"]].update(ask)), file=answers, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
