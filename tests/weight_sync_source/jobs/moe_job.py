"""A mixture of experts on two ranks under every kind of sharding; arguments: its directory."""

from __future__ import annotations

from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM
from weight_sync_source.jobs.rank import TIMEOUT, Rank

from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights import TensorMeta
from rollout.weights.wanted import WantedWeights, by_name

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see zero_job.py
BF16 = torch.bfloat16


def fsdp2(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def fsdp1(model: nn.Module) -> nn.Module:
    settings = {"device_id": torch.device("cpu"), "use_orig_params": True}
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = FullyShardedDataParallel(layer, **settings)
    return FullyShardedDataParallel(model, **settings)


def zero3(model: nn.Module) -> nn.Module:
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


if __name__ == "__main__":
    job = Rank()
    directory = Path(job.args[0])
    wanted = [
        TensorMeta(name, BF16, tuple(tensor.shape))
        for name, tensor in load_file(directory / "model.safetensors").items()
    ]
    for make in (DistributedDataParallel, fsdp2, fsdp1, zero3):
        model = make(AutoModelForCausalLM.from_pretrained(directory))
        source = detect(model).source(
            WantedWeights(dtype=BF16, tensors=by_name(wanted)), timeout=TIMEOUT
        )
        metadata = source.metadata()
        found, names = {}, []
        for name, tensor in source:
            names.append([name, list(tensor.shape)])
            if source.agreement.is_sender:
                found[name] = tensor.clone()
        boxes = {n: [[b.starts, b.stops] for b in held] for n, held in source.local_boxes()}
        source.agreement.vote(None, TIMEOUT, "end")
        source.agreement.close()
        if source.agreement.is_sender:
            save_file(found, job.out / f"{make.__name__}.safetensors")
        job.outcome[make.__name__] = {
            "names": names,
            "metadata": metadata and [[m.name, list(m.shape)] for m in metadata],
            "boxes": boxes,
        }
    job.finish()
    dist.barrier()
    dist.destroy_process_group()
