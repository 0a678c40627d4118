"""DeepSpeed engines of two ranks; the argument is the ZeRO stage and whether it runs in bf16."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from weight_sync_source.jobs.rank import TIMEOUT, Rank
from weight_sync_source.jobs.tiny import ALIASES, Tiny

from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights.wanted import WantedWeights

# Its shared-memory collective would be compiled with g++ first; gloo does the same.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine(
    stage: int, bf16: bool, threshold: int = 0, mpu: Any = None
) -> deepspeed.DeepSpeedEngine:
    model = Tiny()
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": threshold},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings, mpu=mpu)[0]


if __name__ == "__main__":
    job = Rank()
    deepspeed.init_distributed("gloo")
    three = engine(3, bf16=False)
    job.outcome["partitioned"] = all(p.numel() == 0 for p in three.module.parameters())
    job.gather("zero3", three, torch.float32)
    job.gather("zero3_cast", three.module, torch.bfloat16)
    three(torch.arange(6).view(1, 6))  # and once more after a forward, which gathers by itself
    job.gather("zero3_used", three, torch.bfloat16)
    job.outcome["repartitioned"] = all(p.numel() == 0 for p in three.module.parameters())
    loss = three(torch.arange(6).view(1, 6)).sum()
    with torch.inference_mode():
        job.gather("zero3_inference", three, torch.float32)
    try:
        three.backward(loss)
        job.outcome["trains_on"] = None
    except AttributeError as error:
        job.outcome["trains_on"] = str(error)
    job.gather("zero3_persistent", engine(3, bf16=False, threshold=100_000), torch.float32)
    job.gather("zero3_bf16", engine(3, bf16=True), torch.bfloat16)
    own = engine(3, bf16=False)
    own.module.model.correction.add_(job.rank)
    job.gather("zero3_own_buffers", own, torch.float32)
    job.gather("zero2", engine(2, bf16=False), torch.bfloat16)
    job.gather("zero1_bf16", engine(1, bf16=True), torch.bfloat16)

    parameters = list(three.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters, modifier_rank=0):
        job.refused("gathered", three)
        if job.rank == 0:
            parameters[0].data.add_(1)
        job.refused("changed", three)
    job.refused("no longer gathered", three)

    source = detect(three).source(
        WantedWeights(aliases=ALIASES, dtype=torch.bfloat16), timeout=TIMEOUT
    )

    def on_rank_1(index: int) -> None:
        if job.rank == 1 and index == 1:
            raise ValueError("the trainer tripped")

    job.failing("raises", source.agreement, list(source), on_rank_1)
    # Last, as DeepSpeed remembers it: the ranks share each sequence.
    parallel_state_sp.initialize_sequence_parallel(2)
    job.gather("zero1_sequences", engine(1, bf16=False, mpu=parallel_state_sp), torch.bfloat16)
    job.finish()
    dist.barrier()
    dist.destroy_process_group()
