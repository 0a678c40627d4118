"""A model that the first stage of a pipeline has, on the ranks of the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from rollout.distributed.stage import Stage
from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.weight_io.table import ParamSpec
from rollout.weights import PLAIN, WeightSlot

_NOTHING = "away"  # the one parameter, of no elements


class AwayModel(Model):
    """A component beside a policy in stages: what ``make`` builds is known, and not kept."""

    def __init__(self, build: Build, make: Callable[[Build], Model]) -> None:
        super().__init__(build, 0)
        self._make = make
        there = make(replace(build, device=torch.device("meta"), stage=Stage()))
        self.comes_with_policy = there.comes_with_policy
        nothing = torch.empty(0, dtype=build.dtype, device=build.device)
        self.register_parameter(_NOTHING, nn.Parameter(nothing, requires_grad=False))
        self.table = replace(
            there.table,
            slots={
                name: (WeightSlot.of_nothing(name, slots[0].shape, _NOTHING),)
                for name, slots in there.table.slots.items()
            },
            params={_NOTHING: ParamSpec((0,), PLAIN)},
        )
        self.eval()

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        raise NotImplementedError("another stage's model is not run")

    def empty_like(self) -> Self:
        return type(self)(self.build, self._make)
