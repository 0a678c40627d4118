"""Trainer ranks of the benchmarks: their gloo group, and a checkpoint under FSDP2.

torch is imported when a rank runs: the processes that only start ranks do without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

TRAINERS = 2


@contextmanager
def trainer_group(rendezvous: str | Path, rank: int, seconds: float = 120.0) -> Iterator[None]:
    """This process, of one thread, as rank ``rank`` of ``TRAINERS``; ``rendezvous``: a new file."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=TRAINERS,
        timeout=timedelta(seconds=seconds),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def sharded_checkpoint(path: str, dtype: str) -> Any:
    """The model of a checkpoint, sharded layer by layer over the group; collective."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    mesh = init_device_mesh("cpu", (TRAINERS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
