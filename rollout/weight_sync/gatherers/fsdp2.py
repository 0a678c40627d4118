"""FSDP2 (``fully_shard``), tensor-parallel and hybrid meshes: parameters are DTensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rollout.errors import SourceFailed
from rollout.weight_sync.agreement import Agreement
from rollout.weight_sync.names import bind, named_weights, wire_dtype
from rollout.weights import Box, TensorMeta


class FSDP2Source:
    """Each rank casts its shard of one tensor and sends it to the sender; then the next tensor.

    Row shards (what ``fully_shard`` makes) go straight into their rows of one buffer that the
    sender reuses: peak extra memory is the largest tensor on the sender and a cast shard
    elsewhere, where ``full_tensor`` would hold up to four tensors on every rank. Other placements
    (tensor-parallel meshes) do take ``full_tensor``. Where a mesh dimension replicates (HSDP),
    only the sender's replica gathers. Reading a model between its forward and its backward is not
    supported: unsharded parameters are resharded first.
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
        reshard(module)
        self._bound = bind(named_weights(module), aliases)
        self._buffer: Tensor | None = None
        if not self._bound:
            raise SourceFailed(f"{type(module).__name__} holds no tensor; nothing can be sent")

    def metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(
            TensorMeta(name, wire_dtype(t.dtype, self._dtype), tuple(t.shape))
            for name, t in self._bound.items()
        )

    @torch.no_grad()
    def _full(self, tensor: Tensor) -> Tensor:
        """``tensor`` whole in the wire dtype on the sender, a meta tensor elsewhere."""
        dtype = wire_dtype(tensor.dtype, self._dtype)
        empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
        if not isinstance(tensor, DTensor):
            return tensor.detach().to(dtype) if self.agreement.is_sender else empty
        mesh, placements = tensor.device_mesh, tensor.placements
        here = mesh.get_coordinate()
        if here is None or any(
            at and place.is_replicate() for at, place in zip(here, placements, strict=True)
        ):
            return empty  # another replica's whole subgroup skips with us
        # Cast before the gather: half the bytes, and values equal to a cast afterwards. A shard
        # offloaded to the CPU goes to the device its mesh communicates on.
        local = tensor.to_local().to(mesh.device_type, dtype)
        rows = _row_dimension(tensor)
        if rows is not None:
            return self._gather_rows(tensor, local, rows) if tensor.numel() else local
        cast = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        full = cast.full_tensor()
        return full if self.agreement.is_sender else empty

    def _gather_rows(self, tensor: DTensor, local: Tensor, dimension: int) -> Tensor:
        """Move every rank's rows into the sender's buffer; a meta tensor elsewhere."""
        group = tensor.device_mesh.get_group(dimension)
        members = dist.get_process_group_ranks(group)
        if not self.agreement.is_sender:
            if local.numel():
                dist.send(local.contiguous(), members[0], group)
            return torch.empty(tensor.shape, dtype=local.dtype, device="meta")
        full = self._room(tensor.numel(), local).view(tensor.shape)
        per_rank = -(-tensor.shape[0] // len(members))
        arriving = [
            dist.irecv(rows, src=member, group=group)
            for member, rows in zip(members, torch.split(full, per_rank), strict=False)
            if member != members[0]
        ]
        full[: local.shape[0]].copy_(local)
        for work in arriving:
            assert work is not None
            work.wait()
        return full

    def _room(self, numel: int, like: Tensor) -> Tensor:
        """``numel`` elements of the reused buffer; a yielded tensor is valid until the next."""
        nbytes = numel * like.dtype.itemsize
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None
            largest = max(
                t.numel() * wire_dtype(t.dtype, self._dtype).itemsize for t in self._bound.values()
            )
            self._buffer = torch.empty(largest, dtype=torch.uint8, device=like.device)
        return self._buffer[:nbytes].view(like.dtype)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for name, tensor in self._bound.items():
                yield name, self._full(tensor)
        finally:
            self._buffer = None

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(name, local_box(tensor)) for name, tensor in self._bound.items()]

    @torch.no_grad()
    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        tensor = self._bound[name]
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
        value = local.to(wire_dtype(tensor.dtype, self._dtype))
        return [(box, value.reshape(box.shape)) for box in local_box(tensor)]


def ranks(module: nn.Module) -> tuple[int, ...]:
    """Every rank of the meshes that ``module``'s parameters lie on; mesh order, sender first."""
    reshard(module)
    meshes = {t.device_mesh for _, t in named_weights(module) if isinstance(t, DTensor)}
    found: dict[int, None] = {}
    for mesh in sorted(meshes, key=lambda m: (-m.size(), m.mesh.flatten().tolist())):
        found.update(dict.fromkeys(mesh.mesh.flatten().tolist()))
    return tuple(found)


def reshard(module: nn.Module) -> None:
    """Make every parameter its sharded self; local. After a forward, roots may be unsharded."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def _row_dimension(tensor: DTensor) -> int | None:
    """The mesh dimension that shards the rows, if that is all that is sharded."""
    sharded = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
    if len(sharded) != 1 or type(tensor.placements[sharded[0]]) is not Shard:
        return None
    return sharded[0] if tensor.placements[sharded[0]].is_shard(0) else None


def local_box(tensor: Tensor) -> list[Box]:
    """The box of ``tensor`` on this rank; none when its shard is empty or is no single box."""
    if not isinstance(tensor, DTensor):
        return [Box.full(tuple(tensor.shape))]
    if any(type(place) is not Shard and not place.is_replicate() for place in tensor.placements):
        return []
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    box = Box.full(tuple(shape)).shifted(tuple(offset))
    return [box] if box.numel else []
