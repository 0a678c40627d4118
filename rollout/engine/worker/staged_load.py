"""What one update fills on a rank: an instance of the model, slots of adapters, or both."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from torch import Tensor

from rollout.engine.worker.weight_instances import ModelInstances
from rollout.errors import ConfigError
from rollout.kernels.digest.strides import row_major
from rollout.models.adapters.model import AdapterModel
from rollout.models.adapters.slots import AdapterSlots
from rollout.models.model import Model
from rollout.models.weight_io.known_bucket import KnownBucket
from rollout.models.weight_io.load import NamedBox, WeightLoad
from rollout.models.weight_io.raw_load import RawLoad
from rollout.weight_sync.protocol.bucket import read_in_place
from rollout.weight_sync.protocol.messages import BucketEntry, BucketHeader, UpdateRequest
from rollout.weights import Box, CellPatch, WeightSlot, WeightValue
from rollout.weights.components import (
    adapter_component,
    adapter_of,
    component_of,
    own_name,
    qualified,
)


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
        if adapters is not None and request.adapters:
            adapters.await_steps()
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
        """What lies in the sender's memory; what came so before in few calls."""
        only = self._only
        if only is None:
            return self.feed(read_in_place(header, regions))
        part, model, load = only
        known = model.known.get(header.index)
        if known is not None and known.entries is header.entries:
            values = known.values(regions)
            if values is not None and load.feed_planned(known.plan, values):
                return None
        self.feed(read_in_place(header, regions))
        known = _known(header, regions, part, load)
        if known is not None:
            model.known[header.index] = known
        return None

    @property
    def _only(self) -> tuple[str | None, Model, WeightLoad] | None:
        """The one thing that is filled, of the adapter ``part`` (None: of a model)."""
        if isinstance(self._model, WeightLoad) and not self._adapters:
            return None, self._instances.instance(self.live), self._model
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


def _known(
    header: BucketHeader, regions: Sequence[Tensor], part: str | None, load: WeightLoad
) -> KnownBucket | None:
    """Where every entry is of ``part``; they have been checked."""
    entries, lies = header.entries, []
    for entry in entries:
        if (
            entry.region is None
            or entry.offset % entry.dtype.itemsize
            or _adapter(entry.name) != part
        ):
            return None
        first = entry.offset // entry.dtype.itemsize
        lies.append((entry.region, first, row_major(entry.box.shape)))
    plan = load.plan([_named_box(entry, part) for entry in entries])
    if plan is None:
        return None
    return KnownBucket(
        entries=entries,
        sizes=[region.nbytes for region in regions],
        lies=lies,
        dtypes=[entry.dtype for entry in entries],
        plan=plan,
    )


def _named_box(entry: BucketEntry, part: str | None) -> NamedBox:
    name = entry.name if part is None else own_name(entry.name)
    return name, None if entry.box == Box.full(entry.shape) else entry.box


def _adapter(name: str) -> str | None:
    component: Any = component_of(name)
    return component if adapter_of(component) is not None else None


def _named(part: str, slot: WeightSlot) -> WeightSlot:
    return replace(slot, source=qualified(part, slot.source))
