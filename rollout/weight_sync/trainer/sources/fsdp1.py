"""FSDP1 (``FullyShardedDataParallel``): flat parameters, summoned by units or read as they lie."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, FullyShardedDataParallel

from rollout.errors import ConfigError
from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import BoundSource
from rollout.weight_sync.trainer.sources.names import Naming
from rollout.weight_sync.trainer.sources.values import check_all, readable
from rollout.weights import Box
from rollout.weights.box import interval_boxes, interval_values


class FSDP1Source(BoundSource):
    """Units in model order, each summoned on all ranks, cast by the sender, and freed again.

    A flat parameter is gathered whole and in its own dtype, so the cast follows the gather. Peak
    extra memory: one FSDP unit as gathered, and on the sender once more in the wire dtype. Where
    sharding is hybrid, the sender's replica alone gathers.

    A rank's part of a flat parameter is an interval of each original parameter in it, which is
    sent from where it is without a gather: peer to peer.
    """

    def __init__(self, module: nn.Module, naming: Naming, agreement: RankGroup) -> None:
        _check_not_summoned(module)
        self._places = _places(module)
        items = [(place.name, stand_in) for stand_in, place in self._places.items()]
        super().__init__(module, items, naming, agreement)
        whole = [(name, t) for name, t in self._bound.items() if self._places[t].flat is None]
        check_all(whole)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        items = ((name, self._places[tensor]) for name, tensor in self._bound.items())
        for unit, among in groupby(items, key=lambda item: item[1].unit):
            yield from self._summoned(unit, list(among))

    @torch.inference_mode(False)  # what FSDP allocates in here it trains with later
    @torch.no_grad()
    def _summoned(
        self, unit: FullyShardedDataParallel | None, items: list[tuple[str, _Place]]
    ) -> list[tuple[str, Tensor]]:
        """Copies of a unit's tensors, cast, on the sender; meta tensors elsewhere."""
        if unit is None or _is_other_replica(unit):
            return [(name, self._copy(place)) for name, place in items]
        is_new = unit._is_root is None
        with FullyShardedDataParallel.summon_full_params(unit, recurse=False, writeback=False):
            found = [(name, self._copy(place)) for name, place in items]
        if is_new:  # it counts as a root now, which its model's first forward would trip over
            for part in FullyShardedDataParallel.fsdp_modules(unit):
                part._reset_lazy_init()
        return found

    def _copy(self, place: _Place) -> Tensor:
        dtype = self._naming.dtype_of(place.name, place.dtype)
        if not self.agreement.is_sender:
            return torch.empty(place.shape, dtype=dtype, device="meta")
        tensor: Tensor = getattr(place.module, place.attribute)
        return readable(place.name, tensor).to(dtype, copy=True)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        found = []
        for name, tensor in self._bound.items():
            place = self._places[tensor]
            start, values = self._interval(place)
            found.append((name, interval_boxes(place.shape, start, start + len(values))))
        return found

    def held_values(self, name: str) -> list[tuple[Box, Tensor]]:
        place = self._places[self._bound[name]]
        start, values = self._interval(place)
        return interval_values(place.shape, start, values)

    def _interval(self, place: _Place) -> tuple[int, Tensor]:
        """What this rank sends; buffers, and what FSDP ignores, are not flattened."""
        start, values = place.interval()
        return start, values if self._sends(place.flat is not None) else values[:0]


@dataclass(frozen=True)
class _Place:
    """Where a tensor is: an attribute of a module, and ``index`` in a flat parameter if in one."""

    name: str
    unit: FullyShardedDataParallel | None
    module: nn.Module
    attribute: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    flat: Any = None  # a FlatParameter; its attributes are FSDP's own business, untyped
    index: int = 0

    def interval(self) -> tuple[int, Tensor]:
        """Where this rank's part of the flattened tensor starts, and its values.

        No values where nothing of it is here, or where it is not flattened row by row.
        """
        if self.flat is None:
            tensor: Tensor = getattr(self.module, self.attribute)
            return 0, readable(self.name, tensor).reshape(-1)
        shard: Tensor = getattr(self.flat, "_local_shard", self.flat.data)  # absent before it ran
        part = self.flat._shard_param_infos[self.index]
        rows = self.flat._contiguities[self.index]
        if not (part.in_shard and rows) or self.flat._param_extensions[self.index] is not None:
            return 0, shard.new_empty(0)
        stop = part.offset_in_shard + part.numel_in_shard
        held = readable(self.name, shard)[part.offset_in_shard : stop]
        return part.intra_param_start_idx, held


def ranks(module: nn.Module) -> tuple[int, ...]:
    """The ranks that hold ``module``'s first unit, the sender first; replicas included."""
    unit = next(m for m in module.modules() if isinstance(m, FullyShardedDataParallel))
    members = tuple(dist.get_process_group_ranks(unit.process_group))
    replicas = getattr(unit, "_inter_node_pg", None)
    if replicas is None:
        return members
    mesh = getattr(unit, "_device_mesh", None)
    if mesh is not None:
        return tuple(mesh.mesh.flatten().tolist())
    if len(members) * dist.get_world_size(replicas) != dist.get_world_size():
        raise ConfigError(
            "hybrid-sharded FSDP over a part of the job: give it its device_mesh, so that its "
            "ranks know each other"
        )
    return tuple(range(dist.get_world_size()))


def _check_not_summoned(module: nn.Module) -> None:
    """What is changed while parameters are summoned reaches the shards when that ends."""
    for part in module.modules():
        handle = (
            getattr(part, "_handle", None) if isinstance(part, FullyShardedDataParallel) else None
        )
        if handle is not None and handle._training_state.name == "SUMMON_FULL_PARAMS":
            raise ConfigError(
                "the module is inside FSDP's summon_full_params: leave that before the update, "
                "which sends the shards, and what was changed reaches them at its end"
            )


def _is_other_replica(unit: FullyShardedDataParallel) -> bool:
    """Whether another replica than this rank's sends, where sharding is hybrid."""
    replicas = getattr(unit, "_inter_node_pg", None)
    return replicas is not None and dist.get_rank(replicas) != 0


def _places(module: nn.Module) -> dict[Tensor, _Place]:
    """Every tensor once, unit by unit: what stands for it (of its shape), and where it is."""
    found: dict[FullyShardedDataParallel | None, dict[Tensor, _Place]] = {None: {}}
    unit_of: dict[str, FullyShardedDataParallel | None] = {"": None}
    taken: dict[int, dict[str, _Place | None]] = {}  # by module: what is in a flat parameter
    for name, owner in module.named_modules():
        unit = unit_of.get(name.rpartition(".")[0])
        if isinstance(owner, FullyShardedDataParallel):
            unit = owner
            for inside, attribute, place in _flattened(owner):
                taken.setdefault(id(inside), {})[attribute] = place
        unit_of[name] = unit
        for stand_in, place in _of_module(name, owner, unit, taken.get(id(owner), {})):
            found.setdefault(unit, {}).setdefault(stand_in, place)
    return {stand_in: place for places in found.values() for stand_in, place in places.items()}


def _flattened(
    unit: FullyShardedDataParallel,
) -> Iterator[tuple[nn.Module, str, _Place | None]]:
    """What one unit has flattened, by module and attribute; None for a tied one's other names."""
    handle = unit._handle
    if handle is None:
        return
    if handle._use_orig_params and not handle._skip_writeback_check:
        handle._writeback_orig_params()  # as before a forward: what the trainer put in their place
    flat: Any = handle.flat_param
    dtype = getattr(flat, "_local_shard", flat).dtype
    for index, (attribute, owner, _) in enumerate(flat._param_infos):
        shape = tuple(flat._shapes[index])
        yield owner, attribute, _Place("", unit, owner, attribute, shape, dtype, flat, index)
    for attribute, owner, *_ in flat._shared_param_infos:
        yield owner, attribute, None


def _of_module(
    name: str,
    owner: nn.Module,
    unit: FullyShardedDataParallel | None,
    taken: Mapping[str, _Place | None],
) -> Iterator[tuple[Tensor, _Place]]:
    """The parameters of one module itself, those in flat parameters first, then its buffers."""
    prefix = f"{name}." if name else ""
    for place in taken.values():
        if place is not None:
            stand_in = torch.empty(place.shape, dtype=place.dtype, device="meta")
            yield stand_in, replace(place, name=prefix + place.attribute)
    whole = [
        *owner._parameters.items(),
        *((n, b) for n, b in owner._buffers.items() if n not in owner._non_persistent_buffers_set),
    ]
    for attribute, tensor in whole:
        if tensor is None or attribute in taken or isinstance(tensor, FlatParameter):
            continue
        shape = tuple(tensor.shape)
        yield tensor, _Place(prefix + attribute, unit, owner, attribute, shape, tensor.dtype)
