"""A source whose names are those of files, seen by those that the engine knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from rollout.weight_sync.trainer.sources.base import (
    LocalSource,
    WeightSource,
    held_values,
    none_is_taken,
)
from rollout.weights import Box, TensorMeta
from rollout.weights.names import placed


def placed_source(inner: WeightSource, prefixes: Mapping[str, str]) -> WeightSource:
    """``inner`` by the names of ``prefixes`` (``weights.names.placed``), as whatever else a trainer
    passes; itself where that changes none.

    In lockstep as ``inner`` is, which gathers what is passed over, too. Raises ``SourceFailed``
    where nothing is left.
    """
    if not prefixes:
        return inner
    names = [meta.name for meta in inner.metadata() or ()]  # none: they are known as they come
    if names and all(placed(name, prefixes) == name for name in names):
        return inner
    if names and not any(placed(name, prefixes) for name in names):
        raise none_is_taken(f"the {type(inner).__name__}", names)
    return (_LocalPlaced if isinstance(inner, LocalSource) else _Placed)(inner, prefixes)


class _Placed:
    def __init__(self, inner: Any, prefixes: Mapping[str, str]) -> None:
        self.inner, self.agreement, self._prefixes = inner, inner.agreement, prefixes

    def metadata(self) -> tuple[TensorMeta, ...] | None:
        metas = self.inner.metadata()
        if metas is None:
            return None
        found = ((placed(meta.name, self._prefixes), meta) for meta in metas)
        return tuple(replace(meta, name=name) for name, meta in found if name is not None)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        items, passed, came = iter(self.inner), list[str](), False
        # An iterator that ends early must close the inner one: it may hold gathered parameters.
        with closing(items) if hasattr(items, "close") else nullcontext():
            for raw, tensor in items:
                if (name := placed(raw, self._prefixes)) is not None:
                    came = True
                    yield name, tensor
                elif not came:
                    passed.append(raw)
        if passed and not came:
            raise none_is_taken(f"the {type(self.inner).__name__}", passed)

    def local_boxes(self) -> list[tuple[str, list[Box]]]:
        found = ((placed(name, self._prefixes), boxes) for name, boxes in self.inner.local_boxes())
        return [(name, boxes) for name, boxes in found if name is not None]


class _LocalPlaced(_Placed):
    """The same, of a source that reads its own boxes."""

    def __init__(self, inner: Any, prefixes: Mapping[str, str]) -> None:
        super().__init__(inner, prefixes)
        self._raw = {placed(name, prefixes): name for name, _ in inner.local_boxes()}

    def local_values(self, name: str) -> list[tuple[Box, Tensor]]:
        values: list[tuple[Box, Tensor]] = self.inner.local_values(self._raw.get(name, name))
        return values

    def held_values(self, name: str) -> list[tuple[Box, Tensor]] | None:
        return held_values(self.inner, self._raw.get(name, name))
