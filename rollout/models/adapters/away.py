"""What adapters have beside modules of other stages of a pipeline, on a rank without those."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.models.adapters.model import Declared
from rollout.models.weight_io.table import ParamSpec
from rollout.weights import PLAIN, Shape, WeightSlot
from rollout.weights.adapters import AdapterSpec


class AwayAdapters:
    """What all slots hold for them: how much each module's adapter counts, since every rank proves
    what it was told of an adapter. Its factors are known, and none of them is kept.

    ``shapes``: by module, of its weight in files. scales: float32 [slots, modules].
    """

    tensors: tuple[Tensor, ...] = ()

    def __init__(
        self,
        shapes: Mapping[str, Shape],
        kinds: tuple[str, ...],
        count: int,
        device: torch.device,
    ) -> None:
        self.shapes, self.kinds = shapes, kinds
        self.scales = torch.zeros(count, len(shapes), dtype=torch.float32, device=device)

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def of(self, slot: int) -> AdaptedAway:
        return AdaptedAway(self.shapes, self.scales[slot])


@dataclass(frozen=True, slots=True)
class AdaptedAway:
    """One slot of it; as ``AdaptedLinear``."""

    shapes: Mapping[str, Shape]
    scales: Tensor

    def reset(self) -> None:
        self.scales.zero_()

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    def declare(self, name: str, spec: AdapterSpec) -> Declared:
        """Of each tensor a slot that takes nothing."""
        slots = [
            WeightSlot.of_nothing(source, shape, name)
            for module, of in spec.modules.items()
            if module in self.shapes
            for source, shape in of.tensors(module, self.shapes[module]).items()
        ]
        none = torch.empty(0, device=self.scales.device)
        return Declared(slots=slots, params={name: ParamSpec((0,), PLAIN)}, storages={name: none})
