"""FSDP2 (``fully_shard``), tensor-parallel and hybrid meshes: modules and dicts of DTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rollout.errors import WeightMismatch
from rollout.kernels import nontemporal_copy
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import BoundSource, BufferFor
from rollout.weight_sync.trainer.sources.names import Naming, Pairs, held_by
from rollout.weight_sync.trainer.sources.values import check_all, local_part, readable
from rollout.weights import Box, Shape


class FSDP2Source(BoundSource):
    """Each rank casts its shard of one tensor and sends it to the sender; then the next tensor.

    Shards go straight into their box of the bucket that will be sent, or, where a tensor is larger
    than a bucket, of a buffer that the sender reuses. Peak extra memory is at most the largest
    tensor on the sender (where tensor parallelism cuts columns, and one shard) and a cast shard
    elsewhere; ``full_tensor`` would hold up to four tensors on every rank. Only what is no single
    box (partial sums, uneven strided shards) takes it. Where a mesh dimension replicates (HSDP),
    only the sender's replica gathers. Unsharded parameters are resharded first: a backward gathers
    them again by itself, but not those that the trainer has unsharded by hand.
    """

    def __init__(self, weights: Weights, naming: Naming, agreement: RankGroup) -> None:
        items = held_items(weights, naming.wants)
        check_all(items)
        super().__init__(weights, items, naming, agreement)
        self._boxes: dict[int, list[Box]] = {}  # by what is bound
        self._buffer: Tensor | None = None
        self._cast: tuple[Tensor | None, Tensor | None] = (None, None)  # a shard as last gathered
        self._place: BufferFor = lambda dtype, shape: None

    @torch.no_grad()
    def _full(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor`` whole in the wire dtype on the sender, a meta tensor elsewhere."""
        self._cast = (None, None)
        dtype = self._naming.dtype_of(name, tensor.dtype)
        empty = torch.empty(tensor.shape, dtype=dtype, device="meta")
        if not isinstance(tensor, DTensor):
            return readable(name, tensor).to(dtype) if self.agreement.is_sender else empty
        mesh, placements = tensor.device_mesh, tensor.placements
        here, origin = mesh.get_coordinate(), _coordinate(mesh, self.agreement.ranks[0])
        if origin is None and self.agreement.is_sender:
            wrong = (
                f"{name} lies on ranks {mesh.mesh.flatten().tolist()} alone, and rank "
                f"{self.agreement.ranks[0]}, which sends, is none of them; take transport='p2p', "
                "by which each rank sends its own part, or a mesh that has that rank"
            )
            raise WeightMismatch(wrong, problems=[wrong])
        if (
            here is None
            or origin is None
            or any(
                place.is_replicate() and a != b
                for a, b, place in zip(here, origin, placements, strict=True)
            )
        ):
            return empty  # another replica's whole subgroup skips with us
        # Cast before the gather: half the bytes, and values equal to a cast afterwards. A shard
        # offloaded to the CPU goes to the device its mesh communicates on. What has to be summed
        # is cast behind the sum, or each part would be rounded.
        summed = any(place.is_partial() for place in placements)
        local = readable(name, tensor.to_local())
        local = local.to(mesh.device_type, local.dtype if summed else dtype)
        self._cast = (tensor, local)  # its digest is taken next
        boxes = _boxes(tensor, origin)
        if boxes is not None:
            return self._gather_boxes(tensor, local, boxes) if tensor.numel() else local
        cast = DTensor.from_local(
            local, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
        full = cast.full_tensor()
        return full.to(dtype) if self.agreement.is_sender else empty

    def _gather_boxes(self, tensor: DTensor, local: Tensor, boxes: dict[int, Box]) -> Tensor:
        """Move every rank's box into the sender's buffer; a meta tensor elsewhere."""
        sender = self.agreement.ranks[0]
        cut = [i for i, place in enumerate(tensor.placements) if not place.is_replicate()]
        # Along several dimensions of a mesh, the job's own group alone has all of its ranks.
        group = tensor.device_mesh.get_group(cut[0]) if len(cut) == 1 else None
        if not self.agreement.is_sender:
            if local.numel():
                dist.send(local.contiguous(), sender, group)
            return torch.empty(tensor.shape, dtype=local.dtype, device="meta")
        full = self._place(local.dtype, tuple(tensor.shape))
        if full is None or full.device != local.device:
            full = self._reused(tensor.numel(), local).view(tensor.shape)
        parts = {rank: full[box.slices] for rank, box in boxes.items() if box.numel}
        arriving = [
            dist.irecv(part, src=rank, group=group)
            for rank, part in parts.items()
            if rank != sender and part.is_contiguous()
        ]
        for rank, part in parts.items():
            if rank == sender:
                nontemporal_copy(part, local)
            elif not part.is_contiguous():  # one at a time, so that there is one shard too many
                columns = torch.empty_like(part, memory_format=torch.contiguous_format)
                dist.recv(columns, src=rank, group=group)
                part.copy_(columns)
        for work in arriving:
            assert work is not None
            work.wait()
        return full

    def _reused(self, numel: int, like: Tensor) -> Tensor:
        """``numel`` elements of the reused buffer; a yielded tensor is valid until the next."""
        nbytes = numel * like.dtype.itemsize
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None
            largest = max(
                t.numel() * self._naming.dtype_of(name, t.dtype).itemsize
                for name, t in self._bound.items()
            )
            self._buffer = torch.empty(largest, dtype=torch.uint8, device=like.device)
        return self._buffer[:nbytes].view(like.dtype)

    def place_by(self, buffer_for: BufferFor) -> None:
        self._place = buffer_for

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        try:
            for name, tensor in self._bound.items():
                yield name, self._full(name, tensor)
        finally:
            self._buffer, self._cast = None, (None, None)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [(name, self._held(tensor)) for name, tensor in self._bound.items()]

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        tensor, (gathered, cast) = self._bound[name], self._cast
        if gathered is tensor and cast is not None:
            return [(box, cast.reshape(box.shape)) for box in self._held(tensor)]
        return super().local_values(name)

    def held_values(self, name: str) -> list[tuple[Box, Tensor]]:
        tensor = self._bound[name]
        held = readable(name, local_part(tensor))
        return [(box, held.reshape(box.shape)) for box in self._held(tensor)]

    def _held(self, tensor: Tensor) -> list[Box]:
        """The box that this rank sends; FSDP keeps DTensors alike."""
        if (known := self._boxes.get(id(tensor))) is None:
            sends = self._sends(isinstance(tensor, DTensor))
            known = self._boxes[id(tensor)] = local_box(tensor) if sends else []
        return known


Weights = nn.Module | Pairs


def ranks(weights: Weights) -> tuple[int, ...]:
    """Every rank of the meshes that ``weights`` lie on; mesh order, sender first."""
    meshes = {t.device_mesh for _, t in held_items(weights) if isinstance(t, DTensor)}
    found: dict[int, None] = {}
    for mesh in sorted(meshes, key=lambda m: (-m.size(), m.mesh.flatten().tolist())):
        found.update(dict.fromkeys(mesh.mesh.flatten().tolist()))
    return tuple(found)


def held_items(
    weights: Weights, wants: Callable[[str], bool] = lambda name: False
) -> list[tuple[str, Tensor]]:
    """Names and tensors (``held_by``) of a module, which is resharded first, a dict or pairs."""
    if isinstance(weights, nn.Module):
        reshard(weights)
    return held_by(weights, wants)


def reshard(module: nn.Module) -> None:
    """Make every parameter its sharded self; local. After a forward, roots may be unsharded."""
    from torch.distributed.fsdp import FSDPModule

    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def local_box(tensor: Tensor) -> list[Box]:
    """The box of ``tensor`` on this rank; none when its shard is empty or is no single box."""
    if not isinstance(tensor, DTensor):
        return [Box.full(tuple(tensor.shape))]
    mesh, here = tensor.device_mesh, tensor.device_mesh.get_coordinate()
    if here is None:
        return []
    box = box_at(tuple(tensor.shape), tuple(mesh.shape), tuple(here), tensor.placements)
    return [box] if box is not None and box.numel else []


def box_at(
    shape: Shape, mesh: Sequence[int], at: Sequence[int], placements: Sequence[Placement]
) -> Box | None:
    """What coordinate ``at`` of a mesh holds; None where that is not known to be a single box.

    A strided shard, which ``fully_shard`` makes of what is tensor-parallel already, cuts each of
    the ``split_factor`` parts that later mesh dimensions have cut before it. Parts of unequal
    length are left to DTensor there.
    """
    starts, stops = [0] * len(shape), list(shape)
    for axis in range(len(shape)):
        cuts: list[int] = []  # mesh dimensions, in the order in which they cut this axis
        for dim in reversed(range(len(placements))):
            place = placements[dim]
            if type(place) is Shard and place.dim == axis:
                cuts.insert(0, dim)
            elif isinstance(place, _StridedShard) and place.dim == axis:
                parts = [prod(mesh[d] for d in cuts[:i]) for i in range(len(cuts) + 1)]
                factor = int(place.split_factor)
                if factor not in parts or shape[axis] % (parts[-1] * mesh[dim]):
                    return None
                cuts.insert(parts.index(factor), dim)
            elif not isinstance(place, Shard | _StridedShard | Replicate):
                return None
        for dim in cuts:
            step = -(-(stops[axis] - starts[axis]) // mesh[dim])
            starts[axis] = min(starts[axis] + step * at[dim], stops[axis])
            stops[axis] = min(starts[axis] + step, stops[axis])
    return Box(tuple(starts), tuple(stops))


def _boxes(tensor: DTensor, origin: Sequence[int]) -> dict[int, Box] | None:
    """The box of every rank of the replica that ``origin`` is in; None where one is not known."""
    mesh, found = tensor.device_mesh, {}
    dims = [
        [at] if place.is_replicate() else range(size)
        for at, size, place in zip(origin, mesh.shape, tensor.placements, strict=True)
    ]
    for at in product(*dims):
        box = box_at(tuple(tensor.shape), tuple(mesh.shape), at, tensor.placements)
        if box is None:
            return None
        found[int(mesh.mesh[tuple(at)])] = box
    return found


def _coordinate(mesh: DeviceMesh, rank: int) -> list[int] | None:
    """Where a rank of the job is in a mesh, or None."""
    found: list[list[int]] = (mesh.mesh == rank).nonzero().tolist()
    return found[0] if found else None
