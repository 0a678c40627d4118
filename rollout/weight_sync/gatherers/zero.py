"""DeepSpeed ZeRO-3: parameters are flat partitions, gathered by ``GatheredParameters``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rollout.errors import SourceFailed
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.names import bind, named_weights, wire_dtype
from rollout.weights import Box, Shape, TensorMeta

GATHER_BYTES = 32 << 20  # small parameters are gathered together up to this much


class ZeroSource:
    """Runs of parameters are gathered, cast by the sender, and given back before they are yielded.

    DeepSpeed gathers its own flat partitions in their own dtype, so the cast can only follow the
    gather (in a bf16 run the partitions are bf16 already). Peak extra memory: one run, which is
    one parameter or ``GATHER_BYTES``, as gathered, and on the sender once more in the wire dtype.
    """

    def __init__(
        self,
        module: nn.Module,
        aliases: Mapping[str, str],
        dtype: torch.dtype,
        agreement: Agreement,
    ) -> None:
        self.agreement = agreement
        self._dtype = dtype
        self._bound = bind(named_weights(module), aliases)
        if not self._bound:
            raise SourceFailed(f"{type(module).__name__} holds no tensor; nothing can be sent")

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(
            TensorMeta(name, wire_dtype(t.dtype, self._dtype), full_shape(t))
            for name, t in self._bound.items()
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for run in self._runs():
            yield from self._gather(run)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(name, local_boxes_of(tensor)) for name, tensor in self._bound.items()]

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

    @torch.no_grad()
    def _gather(self, run: list[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
        """Collective: the run's tensors whole on the sender, as meta tensors elsewhere."""
        import deepspeed  # there already: only its engines reach this gatherer

        partitioned = [tensor for _, tensor in run if hasattr(tensor, "ds_id")]
        with deepspeed.zero.GatheredParameters(partitioned, enabled=bool(partitioned)):
            # A copy, as leaving the context frees what was gathered.
            return [
                (name, self._cast(tensor, copy=hasattr(tensor, "ds_id"))) for name, tensor in run
            ]

    def _cast(self, tensor: Tensor, copy: bool) -> Tensor:
        dtype = wire_dtype(tensor.dtype, self._dtype)
        if not self.agreement.is_sender:
            return torch.empty(full_shape(tensor), dtype=dtype, device="meta")
        return tensor.detach().to(dtype, copy=copy)


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


def local_boxes_of(parameter: Any) -> list[Box]:
    """The boxes that make up this rank's flat partition."""
    shape = full_shape(parameter)
    part = getattr(parameter, "ds_tensor", None)
    if part is None:
        return [Box.full(shape)]
    import torch.distributed as dist

    start = part.ds_numel * dist.get_rank(parameter.ds_process_group)
    return flat_boxes(shape, start, min(start + part.ds_numel, prod(shape)))


def flat_boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Disjoint boxes of exactly the row-major elements ``start .. stop``, in order."""
    if start >= stop:
        return []
    if start == 0 and stop == prod(shape):
        return [Box.full(shape)]
    inner = prod(shape[1:])
    first, last = -(-start // inner), stop // inner
    if first > last:  # within one row
        return _row_boxes(shape, last, start - last * inner, stop - last * inner)
    boxes = _row_boxes(shape, first - 1, start - (first - 1) * inner, inner)
    if first < last:
        rest = shape[1:]
        boxes.append(Box((first, *(0,) * len(rest)), (last, *rest)))
    return boxes + _row_boxes(shape, last, 0, stop - last * inner)


def _row_boxes(shape: Shape, row: int, start: int, stop: int) -> list[Box]:
    inner = prod(shape[1:])
    if start >= stop or start >= inner:
        return []
    return [
        Box((row, *box.starts), (row + 1, *box.stops)) for box in flat_boxes(shape[1:], start, stop)
    ]
