"""Several models under one table: the policy, which runs, and what changes with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Self

from torch import Tensor

from rollout.models.forward import ForwardBatch, LayerKV
from rollout.models.model import Model
from rollout.models.weight_io.slots import SlotIO
from rollout.models.weight_io.table import WeightTable
from rollout.weights import WeightSlot
from rollout.weights.components import POLICY, qualified, qualified_names
from rollout.weights.spellings import Spellings


class ComponentModels(Model):
    """The ``policy``, and the ``others`` by component: loaded, digested and committed together.

    Only the policy runs by ``forward``, and it alone may be quantised; the others are held for
    whoever reads them, or runs one beside it.
    Their tensors, aliases and prefixes are in ``table`` as ``component:name``, their parameters as
    ``component.name``. What comes among the policy's tensors and is none of them goes to the
    component that takes it by that name and ``comes_with_policy``: its own head of multi-token
    prediction, where that runs.
    """

    def __init__(self, policy: Model, others: Mapping[str, Model]) -> None:
        super().__init__(policy.build, policy.max_len)
        self._models: dict[str, Model] = {POLICY: policy, **others}
        for component, model in self._models.items():
            self.add_module(f"component_{component}", model)
        tables = {name: model.table for name, model in self._models.items()}
        along = [name for name, model in others.items() if model.comes_with_policy]
        self.table = _merged(tables, along)
        self.eval()

    @property
    def policy(self) -> Model:
        return self._models[POLICY]

    def component(self, name: str) -> Model:
        return self._models[name]

    @property
    def gives_hidden_states(self) -> bool:  # type: ignore[override]
        return self.policy.gives_hidden_states

    @property
    def sparse_layers(self) -> tuple[bool, ...]:  # type: ignore[override]
        return self.policy.sparse_layers

    @property
    def constants(self) -> Mapping[str, Tensor]:  # type: ignore[override]
        return {
            qualified(component, name): value
            for component, model in self._models.items()
            for name, value in model.constants.items()
        }

    def forward(self, batch: ForwardBatch, kv: Sequence[LayerKV]) -> Tensor:
        logits: Tensor = self.policy(batch, kv)
        return logits

    def with_hidden_states(
        self, batch: ForwardBatch, kv: Sequence[LayerKV], count: int
    ) -> tuple[Tensor, Tensor]:
        return self.policy.with_hidden_states(batch, kv, count)

    def empty_like(self) -> Self:
        fresh = {name: model.empty_like() for name, model in self._models.items()}
        return type(self)(fresh.pop(POLICY), fresh)

    def after_load(self) -> None:
        for model in self._models.values():
            model.after_load()

    def storages(self) -> dict[str, Tensor]:
        return {
            f"{component}.{name}": storage
            for component, model in self._models.items()
            for name, storage in model.storages().items()
        }

    def _slot_io(self, slot: WeightSlot) -> SlotIO:
        return SlotIO(self.table, {slot.param: self._storage(slot)})

    def _storage(self, slot: WeightSlot) -> Tensor:
        component, _, name = slot.param.partition(".")
        return self._models[component].owner.get_parameter(name).data


def _merged(tables: Mapping[str, WeightTable], along: Iterable[str]) -> WeightTable:
    """``along``: the components whose tensors may come among the policy's."""
    slots = {
        qualified(component, source): tuple(_merged_slot(component, slot) for slot in found)
        for component, table in tables.items()
        for source, found in table.slots.items()
    }
    policy = tables[POLICY]
    return WeightTable(
        slots,
        {f"{c}.{name}": spec for c, table in tables.items() for name, spec in table.params.items()},
        {a: b for c, t in tables.items() for a, b in qualified_names(c, t.aliases).items()},
        ignored=tuple(dict.fromkeys(chain(*(table.ignored for table in tables.values())))),
        spellings=Spellings.of(
            {name: found[0].shape for name, found in slots.items() if found},
            [
                replace(s, source=qualified(c, s.source), param=qualified(c, s.param))
                for c, table in tables.items()
                for s in table.spellings.told
            ],
        ),
        prefixes=_merged_prefixes(tables, along),
        quantized={_merged_slot(POLICY, slot): row for slot, row in policy.quantized.items()},
        pending=policy.pending,
        digests=f"{POLICY}.{policy.digests}",
    )


def _merged_prefixes(tables: Mapping[str, WeightTable], along: Iterable[str]) -> dict[str, str]:
    """Of all, as an update has them; before those what the policy passes over and others take."""
    passed = tuple(prefix for prefix, own in tables[POLICY].prefixes.items() if not own)
    merged: dict[str, str] = {}
    for component in along:
        for prefix, own in tables[component].prefixes.items():
            if prefix.startswith(passed):
                merged[prefix] = qualified(component, own) if own else ""
    for component, table in tables.items():
        for prefix, own in qualified_names(component, table.prefixes).items():
            merged.setdefault(prefix, own)
    return merged


def _merged_slot(component: str, slot: WeightSlot) -> WeightSlot:
    source, param = qualified(component, slot.source), f"{component}.{slot.param}"
    return replace(slot, source=source, param=param)
