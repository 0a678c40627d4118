"""A CPU's tensors are read where they lie, as a GPU's are: files are mapped as its memory is.

For what has no card and no pretended one: the code that gives out handles, maps and reads is run
on tensors that lie ``in_segment``.
"""

from __future__ import annotations

import contextlib
import ctypes
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import rollout.engine.worker.weight_reader as reading
import rollout.engine.worker.worker as worker
import rollout.weight_sync.trainer.bucket_sender as bucket_sender
import rollout.weight_sync.trainer.mapped_shards as mapped_shards
import rollout.weight_sync.trainer.resharded_boxes as resharded_boxes
import rollout.weight_sync.trainer.sources.values as values
from pretended_cuda.sharing import Runtime
from rollout.weight_sync import transports
from rollout.weight_sync.transports import (
    cuda_handles,
    cuda_ipc,
    cuda_memory,
    cuda_reshard,
    lent_memory,
)

UUID = "5e1f0000-0000-4000-8000-00000000ca40"
UUIDS = [f"{UUID[:-1]}{rank}" for rank in range(8)]  # the first is that one


def replacements() -> Iterator[tuple[Any, str, Any]]:
    """(Object, attribute, what takes its place), for the whole of a process."""
    fake: Any = _Torch()
    for module in (
        values, cuda_handles, cuda_ipc, cuda_memory, cuda_reshard, lent_memory, mapped_shards,
        resharded_boxes,
    ):  # fmt: skip
        yield module, "torch", fake
    for module in (cuda_handles, cuda_ipc, cuda_memory, lent_memory, mapped_shards, worker):
        yield module, "gpu_uuid", lambda device: UUID
    for module in (cuda_ipc, cuda_reshard):
        yield module, "device_of", lambda uuid: torch.device("cpu")
    yield worker, "reached_gpus", lambda device: [UUID]
    yield cuda_memory, "Runtime", Runtime
    yield (
        transports,
        "MODULES",
        {
            (key.replace("/cuda", "/cpu")): where
            for key, where in transports.MODULES.items()
            if key != "ipc/cpu"
        },
    )
    yield reading, "_alone", lambda model: bool(model.table.quantized)
    yield bucket_sender.BucketSender, "__init__", _sender_of_small_ones


def exchanging(rank: Callable[[], int]) -> Iterator[tuple[Any, str, Any]]:
    """As ``replacements``: each trainer rank brings the others boxes from a GPU of its own."""
    yield mapped_shards, "why_not_exchanged", lambda ranks: ""
    yield mapped_shards, "gpu_uuid", lambda device: UUIDS[rank()]


_sender = bucket_sender.BucketSender.__init__


def _sender_of_small_ones(self: Any, *args: Any, **kwargs: Any) -> None:
    """On a CPU it leaves nothing else where it lies."""
    _sender(self, *args, **kwargs)
    self._small = True


class _Torch:
    """torch, but for what asks of CUDA."""

    def __init__(self) -> None:
        stream = types.SimpleNamespace(synchronize=lambda: None, cuda_stream=0)
        self.cuda = types.SimpleNamespace(
            is_available=lambda: True,
            current_device=lambda: 0,
            current_stream=lambda device=None: stream,
            synchronize=lambda device=None: None,
            empty_cache=lambda: None,
            device=lambda device: contextlib.nullcontext(),
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def device(self, *_: Any) -> torch.device:
        return torch.device("cpu")

    def as_tensor(self, memory: Any, *_: Any, **__: Any) -> Tensor:
        found = memory.__cuda_array_interface__
        held: Any = (ctypes.c_uint8 * found["shape"][0]).from_address(found["data"][0])
        held.owner = memory
        return torch.frombuffer(held, dtype=torch.uint8)
