"""Adapters of a rank that are not on its device: what their slots held, in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from rollout.weights.adapters import AdapterSpec


class AdapterPages:
    """Slots have numbers for life and lie in one of the device's places, or in host memory.

    A slot's content never changes once it has been loaded, so what was copied out once is kept.
    ``parts``: by name, one place of each part of the model. ``note``: told of a place's new
    content, None: nothing counts there.
    """

    def __init__(
        self,
        parts: Callable[[int], Mapping[str, Any]],
        note: Callable[[int, AdapterSpec | None], None],
    ) -> None:
        self._parts, self._note = parts, note
        self._at: dict[int, int] = {}  # by place, the slot
        self._specs: dict[int, AdapterSpec] = {}  # of slots that have been loaded
        self._host: dict[int, dict[str, Any]] = {}  # by slot, as far as its spec goes

    def place_of(self, slot: int) -> int | None:
        return next((place for place, held in self._at.items() if held == slot), None)

    def loaded(self, place: int, spec: AdapterSpec | None) -> None:
        """What a place holds has been loaded, None: is about to be."""
        slot = self._at.get(place)
        if slot is None:
            return
        self._host.pop(slot, None)
        if spec is None:
            self._specs.pop(slot, None)
        else:
            self._specs[slot] = spec

    def on_host(self, slot: int) -> Mapping[str, Any] | None:
        """What is kept of a slot, part by part; all parts of one that is yet to be loaded there."""
        return self._host.get(slot)

    def loaded_on_host(self, slot: int, spec: AdapterSpec, parts: Mapping[str, Any]) -> None:
        """``parts``: what was loaded of those."""
        self._specs[slot], self._host[slot] = spec, dict(parts)

    def move(self, moves: Iterable[tuple[int, int, bool]]) -> None:
        """``AdapterPlaces``' moves, in order."""
        for slot, place, is_new in moves:
            if place < 0:
                self._at = {p: s for p, s in self._at.items() if s != slot}
                self._specs.pop(slot, None)
                self._host[slot] = {
                    name: replace(each, **{f: _empty(t).zero_() for f, t in _tensors(each).items()})
                    for name, each in self._parts(0).items()
                }
                continue
            if not is_new:
                self._keep(self.place_of(slot))  # after a move that failed elsewhere
            self._keep(place)
            others = {p: s for p, s in self._at.items() if s != slot and p != place}
            self._at = others | {place: slot}  # the staging thread may be reading the other
            if is_new:
                self.loaded(place, None)
            else:
                self._fill(slot, place)

    def _keep(self, place: int | None) -> None:
        slot = None if place is None else self._at.get(place)
        if place is None or slot is None or slot in self._host or slot not in self._specs:
            return
        wanted = self._specs[slot].modules.keys()
        self._host[slot] = {
            name: replace(each, **{f: _copied(t) for f, t in _tensors(each).items()})
            for name, each in self._parts(place).items()
            if not wanted.isdisjoint(each.modules)
        }

    def _fill(self, slot: int, place: int) -> None:
        kept = self._host[slot]
        self._note(place, None)
        for name, each in self._parts(place).items():
            if name not in kept:
                each.reset()
                continue
            held = _tensors(kept[name])
            for field, tensor in _tensors(each).items():
                tensor.copy_(held[field])
        self._note(place, self._specs[slot])


def _tensors(part: Any) -> dict[str, Tensor]:
    values = ((f.name, getattr(part, f.name)) for f in fields(part))
    return {name: value for name, value in values if isinstance(value, torch.Tensor)}


def _copied(tensor: Tensor) -> Tensor:
    return _empty(tensor).copy_(tensor)


def _empty(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format)
