"""Several sources as one: the components of one update, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import Any

from torch import Tensor

from rollout.weight_sync.trainer.rank_group import RankGroup
from rollout.weight_sync.trainer.sources.base import (
    AtHandSource,
    BufferFor,
    LocalSource,
    PlacingSource,
    StayingSource,
    WeightSource,
    held_values,
)
from rollout.weights import Box, TensorMeta
from rollout.weights.components import POLICY, component_of, own_name, qualified


def together(sources: Mapping[str, WeightSource], group: RankGroup) -> WeightSource:
    """One source of all components' tensors, by their qualified names; in lockstep as they are.

    The policy's may have tensors of further components, which no other has. Ranks of ``group`` read
    their own boxes where those of every component can be.
    """
    local = all(isinstance(source, LocalSource) for source in sources.values())
    return (_LocalComponents if local else _Components)(sources, group)


class _Components:
    def __init__(self, sources: Mapping[str, WeightSource], group: RankGroup) -> None:
        self.agreement, self._sources = group, dict(sources)

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        found: list[TensorMeta] = []
        for component, source in self._sources.items():
            metas = source.metadata()
            if metas is None:
                return None
            found += [replace(meta, name=qualified(component, meta.name)) for meta in metas]
        return tuple(found)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for component, source in self._sources.items():
            items: Any = iter(source)
            with closing(items if hasattr(items, "close") else (pair for pair in items)) as stream:
                for name, tensor in stream:
                    yield qualified(component, name), tensor

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        return [
            (qualified(component, name), boxes)
            for component, source in self._sources.items()
            for name, boxes in source.local_boxes()
        ]

    def place_by(self, buffer_for: BufferFor) -> None:
        for source in self._sources.values():
            if isinstance(source, PlacingSource):
                source.place_by(buffer_for)

    def leave(self, stays: Callable[[Tensor], bool]) -> None:
        for source in self._sources.values():
            if isinstance(source, StayingSource):
                source.leave(stays)

    def at_hand(self) -> list[tuple[str, Tensor]] | None:
        found = []
        for component, source in self._sources.items():
            own = source.at_hand() if isinstance(source, AtHandSource) else None
            if own is None:
                return None
            found += [(qualified(component, name), tensor) for name, tensor in own]
        return found


class _LocalComponents(_Components):
    """Of components that each rank can read its boxes of."""

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        source, own = self._of(name)
        return source.local_values(own)

    def held_values(self, name: str) -> list[tuple[Box, Tensor]] | None:
        return held_values(*self._of(name))

    def _of(self, name: str) -> tuple[LocalSource, str]:
        """The source of a tensor, and what that calls it."""
        own = component_of(name) in self._sources
        source: Any = self._sources[component_of(name) if own else POLICY]  # a LocalSource
        return source, own_name(name) if own else name
