"""Aliases: tensors a checkpoint may carry that must equal another one, bit for bit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from rollout.models.weight_io.slots import SlotIO, read_box
from rollout.models.weight_io.table import WeightTable
from rollout.weights import (
    INTEGERS,
    Box,
    LazyTensor,
    SparsePatch,
    TensorPiece,
    WeightSlot,
    WeightValue,
)


class AliasCheck:
    """Compares what was sent for an alias with its owner's values, on this rank's slots.

    Nothing is compared before ``differing``, when the owner is known to be complete. Until then
    it keeps a copy of this rank's part of a tensor or piece (its memory may be reused), and of a
    ``LazyTensor`` only the handle.
    """

    def __init__(self, table: WeightTable, io: SlotIO) -> None:
        self._table, self._io = table, io
        self._checks: dict[str, list[Callable[[], bool]]] = defaultdict(list)
        self._patched: dict[str, list[Tensor]] = defaultdict(list)  # by owner: positions

    def note_patch(self, owner: str, patch: SparsePatch) -> None:
        """Remember which elements of an owner changed: its alias must change the same ones."""
        if owner in self._table.aliases.values():
            self._patched[owner].append(patch.positions)

    def add(self, alias: str, value: WeightValue) -> None:
        """Remember what ``alias`` was sent; the value's own shape and dtype were checked."""
        owner = self._table.aliases[alias]
        if isinstance(value, SparsePatch):
            self._add_patch(alias, owner, value)
            return
        for slot in self._table.slots[owner]:
            box: Box | None = slot.take
            if isinstance(value, TensorPiece):
                box = slot.take.intersect(value.box)
            if box is not None:
                self._checks[alias].append(self._box_check(slot, box, value))

    def _box_check(
        self, slot: WeightSlot, box: Box, value: Tensor | LazyTensor | TensorPiece
    ) -> Callable[[], bool]:
        """Whether the owner's ``box`` equals the value's, asked later."""
        if isinstance(value, LazyTensor):
            return lambda: same_bits(
                self._io.read_box(slot, box), read_box(slot.source, value, box)
            )
        if isinstance(value, TensorPiece):
            back = tuple(-start for start in value.box.starts)
            sent = value.values[box.shifted(back).slices].clone()
        else:
            sent = value.detach()[box.slices].clone()
        return lambda: same_bits(self._io.read_box(slot, box), sent)

    def differing(self, comparable: Collection[str]) -> list[str]:
        """One line for each alias that differs from its owner, of the ``comparable`` owners."""
        lines = []
        for alias, checks in self._checks.items():
            owner = self._table.aliases[alias]
            if owner in comparable and not all(check() for check in checks):
                lines.append(
                    f"{alias}: differs from {owner}, which it is tied to; untie them in the "
                    "config or send equal values"
                )
        return lines

    def _add_patch(self, alias: str, owner: str, patch: SparsePatch) -> None:
        positions, values = patch.positions.clone(), patch.values.clone()

        def same_positions() -> bool:
            parts = self._patched.get(owner)
            return parts is None or torch.equal(torch.cat(parts).sort().values, positions)

        def same_values() -> bool:
            for slot in self._table.slots[owner]:
                kept, live = self._io.read_at(slot, positions)
                if not same_bits(live, values.to(live.device)[kept]):
                    return False
            return True

        self._checks[alias].extend((same_positions, same_values))


def same_bits(live: Tensor, sent: Tensor) -> bool:
    """Whether ``sent``, cast to the dtype of ``live``, has its bits."""
    bits = INTEGERS[live.dtype.itemsize]
    sent = sent.to(device=live.device, dtype=live.dtype)
    return torch.equal(live.contiguous().view(bits), sent.contiguous().view(bits))
