"""Modules that another stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from rollout.models.layers.base import Build, Layer
from rollout.models.weight_io.table import DeclaresWeights
from rollout.weights import PLAIN, WeightSlot

# Parameters of no elements: of the tensors that are held as they are, and as codes.
_WHOLE, _CODES = "absent", "absent_codes"


class Absent(Layer):
    """Stands where another stage has the module that ``make`` builds: the tensors of that one are
    known here, as those of other ranks' experts are, and nothing of them is kept.
    """

    def __init__(self, build: Build, make: Callable[[Build], nn.Module]) -> None:
        super().__init__(build)
        self._away = (make(replace(build, device=torch.device("meta"))),)  # no submodule
        self.declare(_WHOLE, (0,))
        if (scheme := build.quantization) is not None:
            self.declare_quantized(_CODES, (0, scheme.columns or scheme.per_byte), PLAIN, scheme)

    @property
    def away(self) -> nn.Module:
        """The module, on ``meta``."""
        return self._away[0]

    def slots(self, prefix: str) -> list[WeightSlot]:
        found: dict[str, WeightSlot] = {}
        for name, module in self.away.named_modules(prefix=prefix):
            if not isinstance(module, DeclaresWeights):
                continue
            for slot in module.slots(name):
                # A slot may fill a parameter of a module beside the one that tells of it.
                owner, _, held = slot.param.rpartition(".")
                beside = self.away.get_submodule(owner.removeprefix(prefix).removeprefix("."))
                coded = isinstance(beside, Layer) and beside.specs[held].scheme is not None
                param = _CODES if coded else _WHOLE
                found[slot.source] = WeightSlot.of_nothing(
                    slot.source, slot.shape, f"{prefix}.{param}", len(self.specs[param].shape)
                )
        return list(found.values())


def of_first_stage(build: Build, make: Callable[[Build], nn.Module]) -> nn.Module:
    """What ``make`` builds, on the ranks of the first stage."""
    return make(build) if build.stage.is_first else Absent(build, make)
