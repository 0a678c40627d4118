"""One adapter in its slot on one rank, as a model whose weights are loaded, read and digested."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.layers.base import Build
from rollout.models.model import Model
from rollout.models.weight_io.load import WeightLoad
from rollout.models.weight_io.slots import SlotIO
from rollout.models.weight_io.table import ParamSpec, WeightTable
from rollout.weights import PLAIN, TRANSPOSED, Box, WeightSlot
from rollout.weights.adapters import (
    BIAS,
    BIASED,
    DORA_EMBEDDING,
    EMBEDDING,
    EMBEDDING_A,
    EMBEDDING_B,
    MAGNITUDE,
    NORMED,
    A,
    AdapterSpec,
    B,
    digest_of_scalings,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Declared:
    """What a part of the model has of one adapter: parameters, their memory, what fills them."""

    slots: Sequence[WeightSlot]
    params: Mapping[str, ParamSpec]
    storages: Mapping[str, Tensor]


class Adapted(Protocol):
    """One slot of what lies beside a part of the model.

    scales: float32, one for each of ``modules``, by names in files; ``reset``: nothing counts.
    """

    @property
    def modules(self) -> tuple[str, ...]: ...

    @property
    def scales(self) -> Tensor: ...

    def reset(self) -> None: ...

    def declare(self, name: str, spec: AdapterSpec) -> Declared:
        """``name``: of that part. ``spec`` has at least one of the modules."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptedLinear:
    """One slot of a linear: ``base``: by part, the slots of its weight that one source fills; a:
    [parts, rank, inputs], b: [rank, outputs], magnitudes: float32 [outputs], biases: [outputs],
    scales: [parts].
    """

    base: Sequence[Sequence[WeightSlot]]
    a: Tensor
    b: Tensor
    magnitudes: Tensor
    biases: Tensor
    scales: Tensor

    def reset(self) -> None:
        self.scales.zero_()
        self.biases.zero_()

    @property
    def modules(self) -> tuple[str, ...]:
        return tuple(part[0].source.removesuffix(".weight") for part in self.base)

    def declare(self, name: str, spec: AdapterSpec) -> Declared:
        a, b, magnitudes = (f"{name}{end}" for end in (".lora_A", ".lora_B", MAGNITUDE))
        biases = f"{name}{BIAS}"
        holes: dict[str, list[Box]] = {a: [], b: [], magnitudes: [], biases: []}
        slots = [
            slot for part in range(len(self.base)) for slot in self._slots(name, spec, part, holes)
        ]
        shape = tuple(self.b.shape[::-1])
        params = {
            a: ParamSpec(tuple(self.a.shape), PLAIN, tuple(holes[a])),
            b: ParamSpec(shape, TRANSPOSED, tuple(holes[b])),
        }
        storages = {a: self.a, b: self.b}
        for each, storage in ((magnitudes, self.magnitudes), (biases, self.biases)):
            if sum(hole.numel for hole in holes[each]) < shape[0]:
                storages[each] = storage
                params[each] = ParamSpec(shape[:1], PLAIN, tuple(holes[each]))
        return Declared(slots=slots, params=params, storages=storages)

    def _slots(
        self, name: str, spec: AdapterSpec, part: int, holes: dict[str, list[Box]]
    ) -> list[WeightSlot]:
        """Of one part of a linear; what they leave of the slot goes to ``holes``."""
        base = self.base[part]
        a, b = (f"{name}{end}" for end in (".lora_A", ".lora_B"))
        _, rank, inputs = self.a.shape
        first, last = base[0].put.starts[0], base[-1].put.stops[0]
        stem = base[0].source.removesuffix(".weight")
        module = spec.modules.get(stem)
        used = 0 if module is None else module.rank
        if used < rank:
            holes[a].append(Box((part, used, 0), (part + 1, rank, inputs)))
            holes[b].append(Box((first, used), (last, rank)))
        beside = [
            end
            for end, kinds in ((MAGNITUDE, NORMED), (BIAS, (BIASED,)))
            if module is not None and module.kind in kinds
        ]
        for end in {MAGNITUDE, BIAS} - {*beside}:
            holes[f"{name}{end}"].append(Box((first,), (last,)))
        if module is None:
            return []
        rows, columns = base[0].shape
        begin, behind = base[0].take.starts[1], base[0].take.stops[1]
        is_embedding = module.kind in (EMBEDDING, DORA_EMBEDDING)
        ends = (EMBEDDING_A, EMBEDDING_B) if is_embedding else (A, B)
        down = WeightSlot(
            stem + ends[0], (used, columns), Box((0, begin), (used, behind)),
            a, Box((part, 0, 0), (part + 1, used, inputs)),
        )  # fmt: skip
        up = [
            WeightSlot(
                stem + ends[1], (rows, used), Box((s.take.starts[0], 0), (s.take.stops[0], used)),
                b, Box((s.put.starts[0], 0), (s.put.stops[0], used)),
            )
            for s in base
        ]  # fmt: skip
        rest = [
            WeightSlot(
                stem + end, (rows,), Box(s.take.starts[:1], s.take.stops[:1]),
                f"{name}{end}", Box(s.put.starts[:1], s.put.stops[:1]),
            )
            for end in beside for s in base
        ]  # fmt: skip
        return [down, *up, *rest]


class AdapterModel(Model):
    """A slot that is loaded, as often as need be; what is loaded works once the load has finished.

    Its slots are those of the linears, of A with the rank in the place of the outputs, of B in that
    of the inputs. It is not run: the linears read the slot.
    """

    def __init__(
        self,
        build: Build,
        spec: AdapterSpec,
        adapted: Mapping[str, Adapted],
        unused: Sequence[Adapted] = (),
        note: Callable[[bool], None] = lambda loaded: None,
    ) -> None:
        """``adapted``: by name. ``unused``: the slot of what it leaves alone.
        ``note`` is told when a load begins, and when it has finished.
        """
        super().__init__(build, 1)
        self._note = note
        self.spec, self._adapted, self._unused = spec, adapted, unused
        slots: dict[str, list[WeightSlot]] = defaultdict(list)
        params: dict[str, ParamSpec] = {}
        self._storages: dict[str, Tensor] = {}
        for name, each in adapted.items():
            declared = each.declare(name, spec)
            for slot in declared.slots:
                slots[slot.source].append(slot)
            params |= declared.params
            self._storages |= declared.storages
        self.table = WeightTable({name: tuple(found) for name, found in slots.items()}, params, {})
        self.filled = tuple(slot for found in slots.values() for slot in found)
        self.eval()

    def begin_load(self) -> WeightLoad:
        """Nothing of the slot counts before the load has finished, which fills all but padding."""
        self._note(False)
        for each in (*self._unused, *self._adapted.values()):
            each.reset()
        for name, spec in self.table.params.items():
            for hole in spec.padding:
                logical = self._storages[name]
                if spec.layout is TRANSPOSED:
                    logical = TRANSPOSED.logical(logical)
                logical[hole.slices].zero_()
        return super().begin_load()

    def after_load(self) -> None:
        """Have the slot's factors count."""
        for each in self._adapted.values():
            for part, name in enumerate(each.modules):
                module = self.spec.modules.get(name)
                each.scales[part] = 0.0 if module is None else module.scaling
        self._note(True)

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        raise NotImplementedError("an adapter is run by the linears that it lies beside")

    def empty_like(self) -> Self:
        raise NotImplementedError("a slot has no second instance: another slot is its shadow")

    def storages(self) -> dict[str, Tensor]:
        return self._storages

    def digests(self) -> list[tuple[int, int]]:
        """As ``digest_slots`` of all ``filled``, which stay where they are."""
        return self.digest_slots(self.filled)

    def scaling_digest(self) -> int:
        """``digest_of_scalings`` of what the slot holds, in linears that it leaves alone, too."""
        held = {
            name: each.scales[part]
            for each in self._adapted.values()
            for part, name in enumerate(each.modules)
        }
        held |= {f"unused {i}": each.scales.abs().sum() for i, each in enumerate(self._unused)}
        held |= {
            name + MAGNITUDE: torch.ones(()) for name, of in self.spec.modules.items()
            if of.kind in NORMED
        }  # fmt: skip
        values = torch.stack(list(held.values())).tolist() if held else []
        return digest_of_scalings(dict(zip(held, values, strict=True)))

    def _slot_io(self, slot: WeightSlot) -> SlotIO:
        return SlotIO(self.table, self._storages)
