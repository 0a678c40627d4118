"""Where adapters lie on a rank: slots beside the linears of a model, many at work in one step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rollout.errors import ConfigError
from rollout.kernels import lora_linear
from rollout.models.adapter_model import AdaptedLinear, AdapterModel
from rollout.models.forward import ForwardBatch
from rollout.models.layers.base import Layer
from rollout.models.layers.linear import MergedColumnLinear, ReplicatedLinear, RowLinear
from rollout.models.layers.router import Router
from rollout.models.model import Model
from rollout.weights import WeightSlot
from rollout.weights.adapters import AdapterSpec

LINEARS = (MergedColumnLinear, RowLinear, ReplicatedLinear)


@dataclass(slots=True)
class ActiveRows:
    """The rows of the step at hand that have adapters; None: no row has one."""

    rows: Tensor | None = None
    tiles: Tensor | None = None


class LinearAdapters:
    """What all slots hold for one linear; ``add`` puts it behind the linear's own product.

    a: [slots, parts, rank, inputs of this rank], b: [slots, rank, outputs of this rank], scales:
    float32 [slots, parts]. A part is what one source of the linear's weight fills.
    """

    def __init__(
        self, base: list[list[WeightSlot]], a: Tensor, b: Tensor, active: ActiveRows
    ) -> None:
        self.base, self.a, self.b, self._active = base, a, b, active
        self.scales = torch.zeros(a.shape[:2], dtype=torch.float32, device=a.device)
        self.bounds = (0, *(part[-1].put.stops[0] for part in base))

    @property
    def modules(self) -> tuple[str, ...]:
        """Those of its parts, by the names in files."""
        return tuple(part[0].source.removesuffix(".weight") for part in self.base)

    @property
    def is_idle(self) -> bool:
        """Whether no row of this step has an adapter."""
        return self._active.rows is None

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """``y`` [T, outputs], with what adapters make of the rows of ``x`` [T, inputs] in it."""
        active = self._active
        if active.rows is not None and active.tiles is not None:
            lora_linear(
                y, x, self.a, self.b, self.scales, self.bounds, active.rows, active.tiles
            )  # fmt: skip
        return y


class AdapterSlots:
    """``count`` slots, each for one adapter of rank at most ``rank``; zeros where there is none.

    Cut over ranks as the linears are: of A what meets this rank's inputs, of B its outputs, so a
    row-parallel linear's part is summed with its own product. Outside of the model's instances,
    which share them; their addresses are fixed.
    """

    def __init__(self, model: Model, count: int, rank: int) -> None:
        self.count, self.rank = count, rank
        self.active = ActiveRows()
        self._views: dict[int, AdapterModel] = {}  # the last of each slot
        self._build = model.build
        self.linears: dict[str, LinearAdapters] = {}
        for name, layer in _linears(model):
            slots = [slot for slot in layer.slots(name) if slot.param == f"{name}.weight"]
            slots.sort(key=lambda slot: slot.put.starts)
            base = [list(part) for _, part in groupby(slots, key=lambda slot: slot.source)]
            rows, columns = layer.specs["weight"].shape
            dtype, device = model.build.dtype, model.build.device
            a = torch.zeros(count, len(base), rank, columns, dtype=dtype, device=device)
            b = torch.zeros(count, rank, rows, dtype=dtype, device=device)
            self.linears[name] = LinearAdapters(base, a, b, self.active)
        if not self.linears:
            raise ConfigError(
                f"max_adapters: {model.config.architecture} has no linears of rollout's own, "
                "beside which adapters could lie; leave it out and load adapters merged"
            )

    @property
    def nbytes(self) -> int:
        tensors = (t for each in self.linears.values() for t in (each.a, each.b))
        return sum(prod(t.shape) * t.element_size() for t in tensors)

    @property
    def modules(self) -> frozenset[str]:
        """What adapters may change, by the names in files."""
        return frozenset(module for each in self.linears.values() for module in each.modules)

    def attach(self, model: Model) -> None:
        """Have an instance's linears add what the slots hold, in steps that begin here."""
        policy: Any = model.policy
        policy.adapters = self
        for name, layer in _linears(model):
            layer.adapters = self.linears[name]

    def begin_step(self, batch: ForwardBatch) -> None:
        """The next products are of this batch, whose tensors are on the slots' device."""
        self.active.rows, self.active.tiles = batch.adapter_rows, batch.adapter_tiles

    def view(self, slot: int, spec: AdapterSpec) -> AdapterModel:
        """One slot as a model of ``spec``, to be loaded, read and digested.

        ``ConfigError`` where it does not fit: too large a rank, or modules without slots.
        """
        seen = self._views.get(slot)
        if seen is not None and seen.spec == spec:
            return seen
        if spec.rank > self.rank:
            raise ConfigError(
                f"the adapter has rank {spec.rank}, and slots are of rank {self.rank}: start the "
                f"engine with max_lora_rank={spec.rank}"
            )
        spec.check_modules(self.modules)
        found: dict[str, AdaptedLinear] = {}
        for name, each in self.linears.items():
            if not spec.modules.keys().isdisjoint(each.modules):
                found[name] = AdaptedLinear(
                    base=each.base, a=each.a[slot], b=each.b[slot], scales=each.scales[slot]
                )
        unused = [each.scales[slot] for name, each in self.linears.items() if name not in found]
        view = self._views[slot] = AdapterModel(self._build, spec, found, unused)
        return view


def _linears(model: Model) -> Iterator[tuple[str, Layer]]:
    """The linears of the policy's blocks that adapters may be served beside, by name."""
    modules: Iterator[tuple[str, nn.Module]] = model.policy.named_modules()
    for name, module in modules:
        if not name.startswith("model.layers."):
            continue  # a tower's run before the step that begins here
        if isinstance(module, LINEARS) and not isinstance(module, Router):
            yield name, module
