"""What all members of a fleet have in common: the tensors of one model, and how they are held."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from rollout.weight_sync.protocol.messages import WeightInfo
from rollout.weights import Shape


@dataclass(frozen=True, slots=True)
class Kind:
    """``shapes``: of each tensor of the model, by its name. ``settings``: by which engines compute
    other bits, as their flags have them; an older one tells fewer.
    """

    shapes: Mapping[str, Shape]
    settings: Mapping[str, str]

    @classmethod
    def of(cls, info: WeightInfo) -> Self:
        return cls(
            {meta.name: meta.shape for meta in info.tensors},
            {
                "dtype": str(info.dtype).removeprefix("torch."),
                "quantization": "none" if info.grid is None else info.grid.scheme,
                **info.numerics,
            },
        )

    def unlike(self, fleet: Kind) -> str:
        """Why an engine of this kind can be no member of that ``fleet``; "" where it can."""
        if self.shapes != fleet.shapes:
            return self._other_model(fleet)
        for flag, own in self.settings.items():
            held = fleet.settings.get(flag, own)
            if own != held:
                return f"its {flag} is {own!r}, and the fleet's {held!r}: start it with that"
        return ""

    def _other_model(self, fleet: Kind) -> str:
        names = dict.fromkeys((*self.shapes, *fleet.shapes))
        others = [name for name in names if self.shapes.get(name) != fleet.shapes.get(name)]
        own, held = (kind.shapes.get(others[0], "missing") for kind in (self, fleet))
        return (
            f"it has another model: {len(others)} of {len(names)} tensors differ ({others[0]}: "
            f"{own} there, {held} in the fleet); start it with the fleet's model"
        )
