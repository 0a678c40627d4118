"""Three ranks: rank 1 is killed in the middle of an update, then the sender in the next one."""

from __future__ import annotations

import os
import signal

import torch
from torch.distributed.fsdp import fully_shard
from weight_sync_source.jobs.rank import TIMEOUT, Rank
from weight_sync_source.jobs.tiny import ALIASES, Tiny

from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.trainer.sources.detect import detect
from rollout.weights.wanted import WantedWeights

if __name__ == "__main__":
    job = Rank()

    def killed(victim: int, index: int) -> None:
        if job.rank == victim and index == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    source = detect(fully_shard(Tiny())).source(
        WantedWeights(aliases=ALIASES, dtype=torch.bfloat16), timeout=TIMEOUT
    )
    job.failing("gather", source.agreement, source, lambda index: killed(1, index))
    agreement = Agreement.over((0, 2), TIMEOUT)
    job.failing("vote", agreement, range(100), lambda index: killed(0, index))
    job.finish()
    os._exit(0)  # the job's own group cannot be taken down with dead members
