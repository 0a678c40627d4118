"""The least that could work, to measure `sync.py` against: bare gathers, and a bare broadcast.

python benchmarks/bare.py MEETING RANK BYTES BUCKET_BYTES      a receiver; `sync.py` starts it
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

RECEIVERS = 2


def gather(model: Any) -> float:
    """Seconds of ``full_tensor`` one by one and nothing else; collective over the trainer."""
    dist.barrier()
    started = time.perf_counter()
    for parameter in model.parameters():
        parameter.full_tensor()
    return time.perf_counter() - started


def broadcast(meeting: str, rank: int, nbytes: int, bucket_bytes: int) -> float:
    """Seconds for as many bytes from rank 0 to all receivers over raw gloo; collective."""
    store = dist.FileStore(meeting, RECEIVERS + 1)
    group = dist.ProcessGroupGloo(store, rank, RECEIVERS + 1, timedelta(seconds=120))
    bucket = torch.ones(bucket_bytes, dtype=torch.uint8)
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    for _ in range(2):  # the first one connects
        group.broadcast([bucket], options).wait()
    started = time.perf_counter()
    for at in range(0, nbytes, bucket_bytes):
        group.broadcast([bucket[: min(bucket_bytes, nbytes - at)]], options).wait()
    group.barrier().wait()
    return time.perf_counter() - started


if __name__ == "__main__":
    torch.set_num_threads(1)
    broadcast(sys.argv[1], *map(int, sys.argv[2:5]))
