"""What one update fills on a rank: an instance of the model, slots of adapters, or both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from rollout.engine.worker.weight_instances import ModelInstances
from rollout.errors import ConfigError
from rollout.models.adapters.model import AdapterModel, KnownBucket
from rollout.models.adapters.slots import AdapterSlots
from rollout.models.weight_io.load import WeightLoad
from rollout.models.weight_io.raw_load import RawLoad
from rollout.weight_sync.protocol.bucket import read_in_place
from rollout.weight_sync.protocol.messages import BucketHeader, UpdateRequest
from rollout.weights import Box, CellPatch, WeightSlot, WeightValue
from rollout.weights.components import (
    adapter_component,
    adapter_of,
    component_of,
    own_name,
    qualified,
)

_ALIGNED = 16  # bytes: the longest element of any dtype


class StagedLoad:
    """Opens what ``request`` brings; an adapter goes to its slot of ``places``, which no sequence
    holds. No instance is touched where no model's weights come.

    Tensors are named as in the update. ``feed`` any number of times, then ``finish``, the digests
    and ``keep``.
    """

    def __init__(
        self,
        instances: ModelInstances,
        adapters: AdapterSlots | None,
        request: UpdateRequest,
        places: Mapping[str, int],
        rank: int,
    ) -> None:
        self._instances, self._request, self._rank = instances, request, rank
        self.live = request.staging == "none"
        self._adapters: dict[str, AdapterModel] = {}
        for name, spec in request.adapters.items():
            if adapters is None:
                raise ConfigError("this rank holds no adapters: start it with max_adapters=")
            self._adapters[adapter_component(name)] = adapters.view(places[name], spec)
        self._loads = {part: model.begin_load() for part, model in self._adapters.items()}
        self._model = self._open() if request.models else None

    def _open(self) -> WeightLoad | RawLoad:
        request = self._request
        if request.encoding == "live":
            return self._instances.open_raw(request.staging, self._rank)
        if self.live:
            return self._instances.open_live(request.components)
        builds_on_live = request.partial or request.encoding == "delta"
        return self._instances.open_shadow(builds_on_live, request.staging, request.components)

    def feed(self, items: Iterable[tuple[str, WeightValue | CellPatch]]) -> None:
        """Write each item; every value stays as it is until this returns."""
        for part, found in groupby(items, lambda item: _adapter(item[0])):
            load = self._model if part is None else self._loads.get(part)
            if load is None:
                load = self._model or next(iter(self._loads.values()))  # which refuses it by name
            elif part is not None:
                found = ((own_name(name), value) for name, value in found)
            load.feed(found, together=True)

    def feed_in_place(self, header: BucketHeader, regions: Sequence[Tensor]) -> None:
        """What lies in the sender's memory; of an adapter that came so before in few calls."""
        only = self._only
        if only is None:
            return self.feed(read_in_place(header, regions))
        part, model, load = only
        known = model.known
        # The same header was checked against memory of these sizes.
        if known is not None and known.header is header and _flat_sizes(regions) == known.sizes:
            flat = zip(regions, known.dtypes, known.plan.shapes, strict=True)
            values = [raw.view(dtype).view(shape) for raw, dtype, shape in flat]
            if load.feed_whole(known.plan, values):
                return None
        self.feed(read_in_place(header, regions))
        model.known = _known(header, regions, part, load)
        return None

    @property
    def _only(self) -> tuple[str, AdapterModel, WeightLoad] | None:
        if self._model is not None or len(self._adapters) != 1:
            return None
        [(part, model)] = self._adapters.items()
        return part, model, self._loads[part]

    def finish(self) -> int:
        """Judge completeness, derive; the bytes that were written."""
        request, nbytes = self._request, 0
        if self._model is not None:
            report = self._model.finish(partial=request.partial, components=request.models)
            nbytes += report.nbytes
        nbytes += sum(load.finish().nbytes for load in self._loads.values())
        self._instances.derive_adapters(live=self.live or self._model is None)
        return nbytes

    def slots(self) -> Iterator[WeightSlot]:
        """All that is to be filled."""
        if self._model is not None:
            models = self._request.models
            yield from (s for s in self._instances.slots() if component_of(s.source) in models)
        for part, model in self._adapters.items():
            yield from (_named(part, slot) for slot in model.filled)

    def digest_slots(
        self, nonfinite: list[tuple[WeightSlot, int]] | None
    ) -> Iterator[tuple[WeightSlot, int]]:
        """Every slot that will be live, and its digest; see ``WeightReader.digest_slots``."""
        if self._model is not None:
            yield from self._instances.reader.digest_slots(self.live, nonfinite=nonfinite)
        for part, model in self._adapters.items():
            for slot, (value, bad) in zip(model.filled, model.digests(), strict=True):
                named = _named(part, slot)
                if nonfinite is not None and bad:
                    nonfinite.append((named, bad))
                yield named, value

    def live_digests(self) -> Sequence[tuple[WeightSlot, int]]:
        """Of quantised slots, as they are held."""
        return [] if self._model is None else self._instances.reader.live_digests(self.live)

    def scalings(self) -> dict[str, int]:
        """By adapter, the digest of how much each module's counts."""
        found = ((adapter_of(part), model) for part, model in self._adapters.items())
        return {name: model.scaling_digest() for name, model in found if name is not None}

    def keep(self) -> None:
        """All is there and digested."""
        if self._model is not None:
            self._instances.finish_load(self.live)


def _flat_sizes(regions: Sequence[Tensor]) -> list[int]:
    """The bytes of each; -1 of what is not flat, dense and aligned for every dtype."""
    return [
        x.numel()
        if x.dtype == torch.uint8 and x.stride() == (1,) and not x.data_ptr() % _ALIGNED
        else -1
        for x in regions
    ]


def _known(
    header: BucketHeader, regions: Sequence[Tensor], part: str, load: WeightLoad
) -> KnownBucket | None:
    """Where each region is one whole tensor of the adapter."""
    sizes, entries = _flat_sizes(regions), header.entries
    if len(entries) != len(regions):
        return None
    for index, entry in enumerate(entries):
        whole = entry.region == index and not entry.offset and entry.box == Box.full(entry.shape)
        if not whole or component_of(entry.name) != part or sizes[index] != entry.nbytes:
            return None
    plan = load.plan_whole([own_name(entry.name) for entry in entries])
    if plan is None:
        return None
    return KnownBucket(
        header=header, sizes=sizes, dtypes=[entry.dtype for entry in entries], plan=plan
    )


def _adapter(name: str) -> str | None:
    component: Any = component_of(name)
    return component if adapter_of(component) is not None else None


def _named(part: str, slot: WeightSlot) -> WeightSlot:
    return replace(slot, source=qualified(part, slot.source))
