"""What lies beside the routed experts of one layer in the slots of adapters.

PEFT (``target_parameters``) keeps the factors of all experts of a parameter [experts, rows,
columns] in two matrices: A [experts x rank, columns], an expert's rows together, and B [rows,
rank x experts], whose column ``i * experts + e`` is of rank ``i`` of expert ``e``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rollout.kernels.fused_experts import ExpertFactors, ExpertsLora
from rollout.models.adapters.linear import ActiveRows
from rollout.models.adapters.model import Declared
from rollout.models.layers.experts import Experts, StackedRows
from rollout.models.weight_io.table import ParamSpec
from rollout.weights import PLAIN, TRANSPOSED, Box, Shape, WeightSlot
from rollout.weights.adapters import EXPERTS, A, AdapterSpec, B
from rollout.weights.spellings import Spellings


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What this rank has of a parameter ``module`` of ``shape`` [experts, rows, columns]: of the
    ``experts`` from the first to before the last those runs of ``rows``, and ``columns``."""

    module: str
    shape: Shape
    experts: tuple[int, int]
    rows: tuple[tuple[int, int], ...]
    columns: tuple[int, int]


class ParameterAdapters:
    """What all slots hold for one stacked parameter.

    a: [slots, experts here, rank, columns here], b: [slots, experts here, rank, rows here], scales:
    float32 [slots, 1].
    """

    kinds: ClassVar[tuple[str, ...]] = (EXPERTS,)

    def __init__(self, part: Part, slots: int, rank: int, **made: Any) -> None:
        """``made``: dtype and device."""
        self.part = part
        count, columns = part.experts[1] - part.experts[0], part.columns[1] - part.columns[0]
        rows = sum(stop - start for start, stop in part.rows)
        self.a = torch.zeros(slots, count, rank, columns, **made)
        self.b = torch.zeros(slots, count, rank, rows, **made)
        self.scales = torch.zeros(slots, 1, **(made | {"dtype": torch.float32}))

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.part.module,)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.b

    @property
    def factors(self) -> ExpertFactors:
        return ExpertFactors(self.a, self.b, self.scales)

    def of(self, slot: int) -> AdaptedParameter:
        return AdaptedParameter(self.part, self.a[slot], self.b[slot], self.scales[slot])


@dataclass(frozen=True, slots=True)
class AdaptedParameter:
    """One slot of it; as ``AdaptedLinear``."""

    part: Part
    a: Tensor
    b: Tensor
    scales: Tensor

    def reset(self) -> None:
        self.scales.zero_()

    @property
    def modules(self) -> tuple[str, ...]:
        return (self.part.module,)

    def declare(self, name: str, spec: AdapterSpec) -> Declared:
        a, b = f"{name}.lora_A", f"{name}.lora_B"
        count, rank, columns = self.a.shape
        rows, used = self.b.shape[2], spec.modules[self.part.module].rank
        holes: dict[str, tuple[Box, ...]] = {a: (), b: ()}
        if used < rank:
            holes[a] = (Box((0, used, 0), (count, rank, columns)),)
            holes[b] = (Box((0, used, 0), (rows, rank, count)),)
        return Declared(
            slots=[*self._down(a, used), *self._up(b, used)],
            params={
                a: ParamSpec((count, rank, columns), PLAIN, holes[a]),
                b: ParamSpec((rows, rank, count), TRANSPOSED, holes[b]),
            },
            storages={a: self.a, b: self.b},
        )

    def _down(self, param: str, rank: int) -> Iterator[WeightSlot]:
        part = self.part
        total, _, columns = part.shape
        (first, last), (begin, end) = part.experts, part.columns
        for expert in range(first, last):
            at = expert - first
            yield WeightSlot(
                part.module + A, (total * rank, columns),
                Box((expert * rank, begin), ((expert + 1) * rank, end)),
                param, Box((at, 0, 0), (at + 1, rank, end - begin)),
            )  # fmt: skip

    def _up(self, param: str, rank: int) -> Iterator[WeightSlot]:
        part = self.part
        total, rows, _ = part.shape
        first, last = part.experts
        for i in range(rank):
            at = 0
            for start, stop in part.rows:
                yield WeightSlot(
                    part.module + B, (rows, total * rank),
                    Box((start, i * total + first), (stop, i * total + last)),
                    param, Box((at, i, 0), (at + stop - start, i + 1, last - first)),
                )  # fmt: skip
                at += stop - start


class BesideExperts:
    """What adapters do at the experts of a layer of an instance."""

    def __init__(self, w13: ParameterAdapters, w2: ParameterAdapters, active: ActiveRows) -> None:
        self._w13, self._w2, self._active = w13, w2, active

    def of_step(self, tokens: int) -> ExpertsLora | None:
        slot_of = self._active.of_tokens(tokens)
        if slot_of is None:
            return None
        return ExpertsLora(self._w13.factors, self._w2.factors, slot_of)


def adaptable_experts(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, Experts]]:
    """The layers of routed experts that adapters may be served beside, by name."""
    for name, module in modules:
        if not isinstance(module, Experts) or type(module) not in (Experts, StackedRows):
            continue
        if _names(name, module):
            yield name, module


def parts_of(name: str, layer: Experts) -> tuple[Part, Part]:
    """What this rank has of both parameters of a layer; in file form, by names of memory."""
    both, down = _names(name, layer)
    total, hidden, inner = layer.total, layer.hidden, layer.inner
    here = layer.first_inner, layer.first_inner + layer.local
    halves = range(1 if layer.squared else 2)
    first = Part(
        module=both,
        shape=(total, len(halves) * inner, hidden),
        experts=layer.kept,
        rows=tuple((half * inner + here[0], half * inner + here[1]) for half in halves),
        columns=(0, hidden),
    )
    second = Part(
        module=down,
        shape=(total, hidden, inner),
        experts=layer.kept,
        rows=((0, hidden),),
        columns=here,
    )
    return first, second


def _names(name: str, layer: Experts) -> tuple[str, ...]:
    """What transformers 5 calls the two parameters of a layer; () where that is not known."""
    spelt = Spellings.of({slot.source: slot.shape for slot in layer.slots(name)})
    known = [*spelt.fused, *spelt.renames]
    found = [
        next((one for one in known if one.rpartition(".")[2] in ends), None)
        for ends in (("gate_up_proj", "up_proj"), ("down_proj",))
    ]
    return tuple(one for one in found if one is not None) if all(found) else ()
