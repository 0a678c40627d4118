"""What an engine takes of a trainer, and what else its tensors may come as."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from rollout.weights import TensorMeta, WeightSlot
from rollout.weights.components import POLICY, adapter_of, component_of, own_name, own_names
from rollout.weights.quantization import Scheme
from rollout.weights.spellings import Spellings


def by_name(metas: Iterable[TensorMeta]) -> dict[str, TensorMeta]:
    return {meta.name: meta for meta in metas}


@dataclass(frozen=True, kw_only=True)
class WantedWeights:
    """The ``tensors`` of a full update, by their names in files.

    ``dtype``: that a trainer's plain floats travel in. ``aliases``: names that may be sent to the
    tensor that owns them. ``prefixes``: what names may begin with (``weights.names.placed``);
    what a policy's stream has of another component, too, begins with that one's name there.
    ``spelled``: what a trainer may have in memory in the place of ``tensors``, where no name tells.
    ``schemes``: of tensors whose codes are taken.
    """

    dtype: torch.dtype
    tensors: Mapping[str, TensorMeta] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefixes: Mapping[str, str] = field(default_factory=dict)
    spelled: Sequence[WeightSlot] = ()
    schemes: Mapping[str, Scheme] = field(default_factory=dict)

    @cached_property
    def components(self) -> tuple[str, ...]:
        """That it has tensors of, in their order."""
        return tuple(dict.fromkeys(map(component_of, self.tensors)))

    @cached_property
    def spellings(self) -> Spellings:
        shapes = {name: meta.shape for name, meta in self.tensors.items()}
        return Spellings.of(shapes, self.spelled)

    @cached_property
    def adapter_prefixes(self) -> dict[str, str]:
        """As ``prefixes``, for the linears of adapters, which are the policy's: also those that
        modules call otherwise.
        """
        return {**own_names(POLICY, self.prefixes), **self.spellings.modules()}

    def get(self, name: str) -> TensorMeta | None:
        """The tensor that what is sent by ``name`` belongs to."""
        return self.tensors.get(self.aliases.get(name, name))

    def of(self, component: str) -> WantedWeights:
        """Its part of them, under its own names; an adapter's begin as ``adapter_prefixes`` say."""
        is_model = adapter_of(component) is None
        return replace(
            self,
            tensors={
                own_name(name): replace(meta, name=own_name(name))
                for name, meta in self.tensors.items()
                if component_of(name) == component
            },
            aliases=own_names(component, self.aliases),
            prefixes=own_names(component, self.prefixes) if is_model else self.adapter_prefixes,
            spelled=[
                replace(slot, source=own_name(slot.source), param=own_name(slot.param))
                for slot in self.spelled
                if component_of(slot.param) == component
            ],
            schemes={
                own_name(name): scheme
                for name, scheme in self.schemes.items()
                if component_of(name) == component
            },
        )

    @property
    def routed(self) -> list[str]:
        """The components whose tensors a policy's stream may have, too."""
        return [
            component_of(own)
            for prefix, own in self.prefixes.items()
            if component_of(prefix) == POLICY != component_of(own)
        ]

    def beside(self, others: Collection[str]) -> WantedWeights:
        """What a policy's source may send where others send the components ``others``; by the names
        of the update.
        """
        return replace(
            self,
            tensors={n: meta for n, meta in self.tensors.items() if component_of(n) not in others},
            prefixes={
                prefix: "" if component_of(own) in others else own
                for prefix, own in self.prefixes.items()
            },
            spelled=[slot for slot in self.spelled if component_of(slot.param) not in others],
        )
