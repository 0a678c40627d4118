"""DeepSpeed ZeRO-3: parameters are flat partitions, gathered by ``GatheredParameters``."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import BoundSource
from rollout.weight_sync.trainer.sources.names import Naming, named_weights
from rollout.weight_sync.trainer.sources.values import readable
from rollout.weights import Box, Shape
from rollout.weights.box import interval_boxes, interval_values

GATHER_BYTES = 32 << 20  # small parameters are gathered together up to this much


class ZeroSource(BoundSource):
    """Runs of parameters are gathered, cast by the sender, and given back before they are yielded.

    DeepSpeed gathers its own flat partitions in their own dtype, so the cast can only follow the
    gather (in a bf16 run the partitions are bf16 already). Peak extra memory: one run, which is
    one parameter or ``GATHER_BYTES``, as gathered, and on the sender once more in the wire dtype.
    Partitions are intervals of flattened parameters, which are sent from where they are without a
    gather: peer to peer.
    """

    def __init__(self, module: nn.Module, naming: Naming, agreement: RankGroup) -> None:
        items = named_weights(module)
        _check_unchanged(items)
        super().__init__(module, items, naming, agreement)

    def _shape(self, tensor: Tensor) -> Shape:
        return full_shape(tensor)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for run in self._runs():
            yield from self._gather(run)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        found = []
        for name, tensor in self._bound.items():
            start, values = self._part(tensor)
            found.append((name, interval_boxes(full_shape(tensor), start, start + len(values))))
        return found

    def held_values(self, name: str) -> list[tuple[Box, Tensor]]:
        tensor = self._bound[name]
        start, values = self._part(tensor)
        return interval_values(full_shape(tensor), start, readable(name, values))

    def _part(self, tensor: Tensor) -> tuple[int, Tensor]:
        """What this rank sends; buffers are not partitioned."""
        start, values = partition(tensor) or (0, tensor.new_empty(0))
        partitioned = getattr(tensor, "ds_tensor", None) is not None
        return start, values if self._sends(partitioned) else values[:0]

    def _runs(self) -> Iterator[list[tuple[str, Tensor]]]:
        run: list[tuple[str, Tensor]] = []
        size = 0
        for name, tensor in self._bound.items():
            nbytes = prod(full_shape(tensor)) * tensor.dtype.itemsize
            if run and size + nbytes > GATHER_BYTES:
                yield run
                run, size = [], 0
            run.append((name, tensor))
            size += nbytes
        yield run

    @torch.inference_mode(False)  # what DeepSpeed allocates in here it trains with later
    @torch.no_grad()
    def _gather(self, run: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Collective: the run's tensors whole on the sender, as meta tensors elsewhere."""
        import deepspeed  # there already: only its engines reach this source

        partitioned = [tensor for _, tensor in run if hasattr(tensor, "ds_id")]
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            # A copy, as leaving the context frees what was gathered.
            return [
                (name, self._cast(name, tensor, copy=hasattr(tensor, "ds_id")))
                for name, tensor in run
            ]

    def _cast(self, name: str, tensor: Tensor, copy: bool) -> Tensor:
        dtype = self._naming.dtype_of(name, tensor.dtype)
        if not self.agreement.is_sender:
            return torch.empty(full_shape(tensor), dtype=dtype, device="meta")
        return readable(name, tensor).to(dtype, copy=copy)


@torch.no_grad()
def _check_unchanged(items: list[tuple[str, Tensor]]) -> None:
    """What is changed while parameters are gathered reaches the partitions when that ends. Those
    that are kept gathered for good say nothing: they follow their partitions at the next forward.
    """
    for name, tensor in items:
        status = getattr(tensor, "ds_status", None)
        if status is None or status.name != "AVAILABLE" or getattr(tensor, "ds_persist", False):
            continue
        start, part = partition(tensor) or (0, tensor.new_empty(0))
        if not torch.equal(tensor.reshape(-1)[start : start + len(part)], part):
            raise ConfigError(
                f"{name} was changed inside GatheredParameters: leave that before the update, "
                "which sends the partitions, and what was changed reaches them at its end"
            )


def ranks(obj: nn.Module) -> tuple[int, ...]:
    """The ranks that the parameters are partitioned over, as ranks of the default group."""
    import torch.distributed as dist

    for parameter in obj.parameters():
        group = getattr(parameter, "ds_process_group", None)
        if group is not None:
            return tuple(dist.get_process_group_ranks(group))
    return tuple(range(dist.get_world_size()))


def full_shape(tensor: Tensor) -> Shape:
    return tuple(getattr(tensor, "ds_shape", tensor.shape))


def partition(parameter: Any) -> tuple[int, Tensor] | None:
    """Where this rank's part of the flattened parameter starts, and its values without padding.

    The whole of what is not partitioned. None where it cannot be read as it is: it is quantised, or
    swapped out.
    """
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return 0, parameter.detach().reshape(-1)
    if part.dtype != parameter.dtype or part.status.name != "AVAILABLE":
        return None
    import torch.distributed as dist

    start = part.ds_numel * dist.get_rank(parameter.ds_process_group)
    length = max(0, min(part.ds_numel, prod(full_shape(parameter)) - start))
    return start, part.detach()[:length]
