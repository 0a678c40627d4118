"""Modules that another stage of a pipeline has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from rollout.models.layers.base import Build, Layer
from rollout.models.weight_io.table import DeclaresWeights
from rollout.weights import Box, WeightSlot

NOTHING = "nothing"  # its one parameter, of no elements


class Absent(Layer):
    """Stands where another stage has the module that ``make`` builds: the tensors of that one are
    known here, as those of other ranks' experts are, and nothing of them is kept.
    """

    def __init__(self, build: Build, make: Callable[[Build], nn.Module]) -> None:
        super().__init__(build)
        self._away = (make(replace(build, device=torch.device("meta"))),)  # no submodule
        self.declare(NOTHING, (0,))

    def slots(self, prefix: str) -> list[WeightSlot]:
        found: dict[str, WeightSlot] = {}
        for name, module in self._away[0].named_modules(prefix=prefix):
            if isinstance(module, DeclaresWeights):
                for slot in module.slots(name):
                    zeros = (0,) * len(slot.shape)
                    none, place = Box(zeros, zeros), f"{prefix}.{NOTHING}"
                    put = Box((0,), (0,))
                    found[slot.source] = WeightSlot(slot.source, slot.shape, none, place, put)
        return list(found.values())


def of_first_stage(build: Build, make: Callable[[Build], nn.Module]) -> nn.Module:
    """What ``make`` builds, on the ranks of the first stage."""
    return make(build) if build.stage.is_first else Absent(build, make)
