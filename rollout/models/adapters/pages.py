"""Adapters of a rank in host memory, which are copied to places on its device to be served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rollout.weights.adapters import AdapterSpec


class AdapterPages:
    """What each slot holds lies in host memory, where it is loaded, read and digested.

    A slot's content never changes once it has been loaded, so a place on the device is filled with
    it (``move``) and never copied back. ``place``: by name, each part of the model in one of them.
    ``note``: told of a place's new content, None: nothing counts there.
    """

    def __init__(
        self,
        place: Callable[[int], Mapping[str, Any]],
        note: Callable[[int, AdapterSpec | None], None],
    ) -> None:
        self._place, self._note = place, note
        self._held: dict[int, tuple[AdapterSpec, dict[str, Any]]] = {}

    def of(self, slot: int, spec: AdapterSpec) -> Mapping[str, Any]:
        """What a slot holds for ``spec``, part by part: zeros, if it held another."""
        known = self._held.get(slot)
        if known is not None and known[0] == spec:
            return known[1]
        self._held.pop(slot, None)  # its memory is free before there is more
        parts = {
            name: replace(each, **{f: _empty(t).zero_() for f, t in _tensors(each).items()})
            for name, each in self._place(0).items()
            if not spec.modules.keys().isdisjoint(each.modules)
        }
        self._held[slot] = spec, parts
        return parts

    def move(self, moves: Iterable[tuple[int, int]]) -> None:
        """``AdapterPlaces``' moves, in order."""
        for slot, place in moves:
            spec, kept = self._held[slot]
            self._note(place, None)
            for name, each in self._place(place).items():
                if name not in kept:
                    each.reset()
                    continue
                held = _tensors(kept[name])
                for field, tensor in _tensors(each).items():
                    tensor.copy_(held[field])
            self._note(place, spec)


def _tensors(part: Any) -> dict[str, Tensor]:
    values = ((f.name, getattr(part, f.name)) for f in fields(part))
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
