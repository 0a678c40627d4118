"""A LoRA model on two ranks under every kind of sharding, and the source that the docs explain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from weight_sync_source.jobs.lora import adapted
from weight_sync_source.jobs.rank import TIMEOUT, Rank
from weight_sync_source.jobs.tiny import ALIASES

from rollout.errors import ConfigError
from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weight_sync.trainer.lockstep import agreed_source
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights.wanted import WantedWeights

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see zero_job.py
BF16, FP32 = torch.bfloat16, torch.float32
FLAT = {"device_id": torch.device("cpu")}


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp1(model: nn.Module) -> nn.Module:
    """Units that mix frozen and trained parameters."""
    layers = model.base_model.model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = FullyShardedDataParallel(layer, **FLAT, use_orig_params=True)
    return FullyShardedDataParallel(model, **FLAT, use_orig_params=True)


def fsdp1_flat(model: nn.Module) -> nn.Module:
    """PEFT's own policy: adapters are units within the units of their layers."""
    for layer in model.base_model.model.model.layers:
        for linear in (layer.up_proj, layer.down_proj):
            for factors in (linear.lora_A, linear.lora_B):
                factors["default"] = FullyShardedDataParallel(factors["default"], **FLAT)
    layers = model.base_model.model.model.layers
    for index, layer in enumerate(layers):
        layers[index] = FullyShardedDataParallel(layer, **FLAT)
    return FullyShardedDataParallel(model, **FLAT)


def zero(model: nn.Module, stage: int, bf16: bool = False) -> nn.Module:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }
    trained = [p for p in model.parameters() if p.requires_grad]
    return deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(trained), config=settings)[
        0
    ]


def documented(job: Rank) -> Any:
    """The source of docs/weight_sync.md, over a matrix and a vector of two rows for each rank."""
    text = (Path(__file__).parents[3] / "docs" / "weight_sync.md").read_text()
    snippets = (part.split("```", 1)[0] for part in text.split("```python\n")[1:])
    code = next(snippet for snippet in snippets if "class RowParallelSource" in snippet)
    names: dict[str, Any] = {"__name__": "documented"}
    exec(compile(code, "weight_sync.md", "exec"), names)
    here = slice(2 * job.rank, 2 * job.rank + 2)
    whole = {"matrix": torch.arange(12.0).view(4, 3), "vector": torch.arange(4.0)}
    return names["RowParallelSource"]({name: t[here] for name, t in whole.items()}, BF16)


def ended_early(model: nn.Module) -> None:
    """An update that ends between a weight and its factors, on all ranks alike."""
    source = detect(model).source(WantedWeights(aliases=ALIASES, dtype=BF16), timeout=TIMEOUT)
    items = iter(source)
    next(items), next(items), next(items)
    items.close()
    source.agreement.close()


def merged_apart(job: Rank) -> None:
    """One rank has its adapter switched off."""
    model = fsdp2(adapted())
    if job.rank == 1:
        model.base_model.disable_adapter_layers()
    info = WeightInfo(
        epoch=1, version=3, label=None, state="idle", dtype=BF16, tensors=(), aliases=ALIASES,
        tensor_parallel_size=1, device="cpu", transports=(),
    )  # fmt: skip
    found = detect(model)
    group = found.rank_group(TIMEOUT)
    try:
        agreed_source(found, info, group, TIMEOUT)
        job.outcome["merged apart"] = ""
    except ConfigError as error:
        job.outcome["merged apart"] = str(error)
    group.close()


if __name__ == "__main__":
    job = Rank()
    deepspeed.init_distributed("gloo")
    replicated = DistributedDataParallel(adapted())
    job.gather("ddp", replicated, BF16)
    job.gather("ddp_adapter", None, FP32, adapters={"a": replicated})
    job.gather("compiled", torch.compile(DistributedDataParallel(adapted())), BF16)
    sharded = fsdp2(adapted())
    job.gather("fsdp2", sharded, BF16)
    ended_early(sharded)
    job.gather("fsdp2_again", sharded, FP32)
    job.gather("fsdp2_partial", sharded, FP32, partial=True)
    job.gather("fsdp2_adapter", None, FP32, adapters={"a": sharded})
    job.gather("fsdp2_beside", sharded, FP32, adapters={"a": sharded})
    job.gather("fsdp2_bf16", fsdp2(adapted(dtype=BF16)), BF16)
    job.gather("fsdp2_dora", fsdp2(adapted(use_dora=True)), BF16)
    job.gather("fsdp1", fsdp1(adapted()), BF16)
    job.gather("fsdp1_flat", fsdp1_flat(adapted()), BF16)
    job.gather("fsdp1_partial", fsdp1_flat(adapted()), FP32, partial=True)
    job.gather("fsdp1_adapter", None, FP32, adapters={"a": fsdp1_flat(adapted())})
    three = zero(adapted(), 3)
    job.gather("zero3", three, BF16)
    ended_early(three)
    job.gather("zero3_partial", three, FP32, partial=True)
    job.gather("zero3_adapter", None, FP32, adapters={"a": three})
    job.gather("zero3_bf16", zero(adapted(dtype=BF16), 3, bf16=True), BF16)
    job.gather("zero3_dora", zero(adapted(use_dora=True), 3), FP32)
    two = zero(adapted(), 2)
    job.gather("zero2", two, BF16)
    job.gather("zero2_adapter", None, FP32, adapters={"a": two})
    job.gather("documented", documented(job), BF16)
    merged_apart(job)
    job.finish()
    dist.barrier()
    dist.destroy_process_group()
