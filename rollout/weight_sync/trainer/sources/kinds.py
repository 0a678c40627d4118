"""What a trainer has passed, told by its ancestry: no package of a trainer is imported for it."""

from __future__ import annotations

import os
import sys
from collections.abc import ItemsView, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.weight_sync.trainer.sources.base import WeightSource
from rollout.weight_sync.trainer.sources.names import submodules
from rollout.weight_sync.trainer.sources.values import is_dtensor

ACCEPTED = (
    "an nn.Module, DistributedDataParallel, FSDP1, FSDP2 (fully_shard), a DeepSpeed engine, any of "
    "them around a PEFT model, a dict or an iterable of (name, tensor or DTensor), a checkpoint "
    "directory, or a WeightSource; or {'policy': one of these, 'draft': another}"
)
READ_TWICE = (list, tuple, ItemsView)  # what can be looked at before it is sent
_DDP = ("torch.nn.parallel.distributed", "DistributedDataParallel")
_ENGINE = ("deepspeed", "DeepSpeedEngine")
_COMPILED = ("torch._dynamo", "OptimizedModule")


def kind_of(obj: Any) -> str:
    """What kind of source ``obj`` is, by its whole ancestry and without importing a trainer."""
    if isinstance(obj, nn.Module):
        return _kind_of_module(obj)
    if isinstance(obj, WeightSource):
        return "source"
    if isinstance(obj, str | Path):
        if isinstance(obj, str) and not obj.strip():  # it would be the working directory
            raise ConfigError("the source is an empty text; give a checkpoint directory's path")
        if os.path.isdir(obj):
            return "directory"
        if os.path.exists(obj):
            raise ConfigError(f"{obj} is a file; give the directory it lies in")
        raise ConfigError(f"{str(obj)!r:.300}: no such directory here; check the path")
    if _holds_dtensors(obj):
        return "fsdp2"
    if isinstance(obj, (Mapping, *READ_TWICE)):
        return "plain"
    if isinstance(obj, Iterable) and not isinstance(obj, Tensor | bytes | bytearray):
        return "iterable"
    raise ConfigError(f"{type(obj).__name__} is not a weight source; pass {ACCEPTED}")


def ranks_of(obj: Any, kind: str) -> tuple[int, ...] | None:
    """Ranks (of the default group) that hold ``obj`` together, the sender first; local."""
    if kind == "fsdp2":
        from rollout.weight_sync.trainer.sources import fsdp2

        return fsdp2.ranks(obj)
    if kind == "fsdp1":
        from rollout.weight_sync.trainer.sources import fsdp1

        return fsdp1.ranks(obj)
    if kind == "zero3":
        from rollout.weight_sync.trainer.sources import zero

        return zero.ranks(obj)
    return ranks_of_whole(obj)


def ranks_of_whole(obj: Any) -> tuple[int, ...] | None:
    """Of what each rank has whole, as DDP's: its ranks; None where it is this process's alone."""
    group = None
    obj = _uncompiled(obj)
    if _is_a(obj, *_DDP):
        group = obj.process_group
    elif _is_a(obj, *_ENGINE):
        # ZeRO-1 and 2: every rank has the whole weights, those that share a sequence, too.
        group = obj.seq_data_parallel_group
    if group is None:
        return None
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def bare_module(module: nn.Module) -> nn.Module:
    """The trainer's own module beneath DDP or a DeepSpeed engine."""
    inner: nn.Module = _uncompiled(module)
    if _is_a(inner, *_DDP) or _is_a(inner, *_ENGINE):
        inner = _uncompiled(inner.module)
    return inner


def several_ranks() -> bool:
    """Whether DTensors of more than one rank can exist in this process; imports nothing."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    import torch.distributed as dist

    return dist.is_initialized() and dist.get_world_size() > 1


def is_dtensor_pair(item: Any) -> bool:
    return isinstance(item, tuple | list) and len(item) == 2 and is_dtensor(item[1])


def _kind_of_module(module: nn.Module) -> str:
    if _is_a(module, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        return "fsdp1"
    parts = submodules(module)
    parameters = [p for part in parts for p in part._parameters.values() if p is not None]
    if any(hasattr(p, "ds_id") for p in parameters):
        return "zero3"
    buffers = (b for part in parts for b in part._buffers.values() if b is not None)
    if any(map(is_dtensor, {type(t): t for t in chain(parameters, buffers)}.values())):
        return "fsdp2"
    kinds = {type(part): part for part in parts}.values()
    if any(_is_a(m, "torch.distributed.fsdp", "FSDPModule") for m in kinds):
        return "fsdp2"  # gathered right now; resharded before it is read
    if any(_is_a(m, "torch.distributed.fsdp", "FullyShardedDataParallel") for m in kinds):
        return "fsdp1"
    return "plain"


def _holds_dtensors(obj: Any) -> bool:
    """Whether a dict, or pairs that can be read twice, hold a DTensor."""
    if "torch.distributed.tensor" not in sys.modules:
        return False
    if isinstance(obj, Mapping):
        return any(map(is_dtensor, obj.values()))
    return isinstance(obj, READ_TWICE) and any(map(is_dtensor_pair, obj))


def _uncompiled(obj: Any) -> Any:
    """What ``torch.compile`` wrapped: DDP may lie beneath it."""
    while _is_a(obj, *_COMPILED):
        obj = obj._orig_mod
    return obj


def _is_a(obj: object, package: str, name: str) -> bool:
    """Whether a class of that name from that package is among ``obj``'s; imports nothing."""
    return any(
        cls.__name__ == name and (cls.__module__ + ".").startswith(package + ".")
        for cls in type(obj).__mro__
    )
