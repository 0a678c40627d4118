"""FSDP1 (``FullyShardedDataParallel``): flat parameters, summoned unit by unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel

from rollout.errors import SourceFailed
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.names import bind_stream, named_weights, wire_dtype
from rollout.weights import Box


class FSDP1Source:
    """Units in model order, each summoned on all ranks, cast by the sender, and freed again.

    A flat parameter is gathered whole and in its own dtype, so the cast follows the gather. Peak
    extra memory: one FSDP unit as gathered, and on the sender once more in the wire dtype. Names
    and shapes are only known inside a summons, so ``metadata`` is None.
    """

    def __init__(
        self,
        module: nn.Module,
        aliases: Mapping[str, str],
        dtype: torch.dtype,
        agreement: Agreement,
    ) -> None:
        self.agreement = agreement
        self._module, self._aliases, self._dtype = module, aliases, dtype
        self._units = [
            m for m in module.named_modules() if isinstance(m[1], FullyShardedDataParallel)
        ]

    def metadata(self) -> None:
        return None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        count = 0
        for item in bind_stream(self._stream(), self._aliases):
            count += 1
            yield item
        if not count:
            raise SourceFailed(f"{type(self._module).__name__} holds no tensor")

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return []  # flat shards are FSDP's own business; nothing can be addressed without a gather

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        if not isinstance(
            self._module, FullyShardedDataParallel
        ):  # what lies outside every unit is whole already
            yield from self._copy(self._module, "")
        for prefix, unit in self._units:
            with (
                torch.no_grad(),
                FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False),
            ):
                copies = self._copy(unit, prefix)
            yield from copies

    def _copy(self, root: nn.Module, prefix: str) -> list[tuple[str, Tensor]]:
        """The weights of ``root`` that belong to no unit below it, cast; meta off the sender."""
        below = tuple(
            name + "."
            for name, m in root.named_modules()
            if name and isinstance(m, FullyShardedDataParallel)
        )
        copies = []
        for name, tensor in named_weights(root):
            if name.startswith(below):
                continue
            dtype = wire_dtype(tensor.dtype, self._dtype)
            if self.agreement.is_sender:
                copy = tensor.detach().to(dtype, copy=True)
            else:
                copy = torch.empty(tensor.shape, dtype=dtype, device="meta")
            copies.append((f"{prefix}.{name}" if prefix else name, copy))
        return copies


def ranks(module: nn.Module) -> tuple[int, ...]:
    """The ranks of the sharding group of ``module``'s first unit, the sender first."""
    unit = next(m for m in module.modules() if isinstance(m, FullyShardedDataParallel))
    return tuple(dist.get_process_group_ranks(unit.process_group))
