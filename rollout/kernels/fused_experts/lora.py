"""What adapters add to the two products of each expert: rows of several adapters and experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.kernels.lora_linear import lora_linear, tiles_of


@dataclass(frozen=True, slots=True)
class ExpertFactors:
    """Of one of the two: a [slots, experts here, rank, inputs], b [slots, experts here, rank,
    outputs], scales float32 [slots, 1]: 0 where the adapter of a slot leaves these alone."""

    a: Tensor
    b: Tensor
    scales: Tensor


@dataclass(frozen=True, slots=True)
class ExpertsLora:
    """``slot_of``: int64 [T], of each token its adapter's slot, or -1.

    ``held``: int64, which of the experts here those in the product are, where not all of them are.
    """

    w13: ExpertFactors
    w2: ExpertFactors
    slot_of: Tensor
    held: Tensor | None = None

    def among(self, held: Tensor) -> ExpertsLora:
        """The same for a product with those ``held`` of the experts here."""
        return replace(self, held=held)

    def add(
        self,
        factors: ExpertFactors,
        y: Tensor,
        x: Tensor | Callable[[], Tensor],
        tokens: Tensor,
        experts: Tensor,
    ) -> None:
        """Add to each row of ``y`` [n, outputs], made of ``x`` [n, inputs] by expert ``experts``
        [n] (within the product's; outside of them: nothing), what its token's adapter does.
        """
        slots, count = self.slot_of[tokens], factors.a.shape[1]
        known = count if self.held is None else len(self.held)
        is_there = (slots >= 0) & (factors.scales[slots, 0] != 0)
        rows = (is_there & (experts >= 0) & (experts < known)).nonzero()[:, 0]
        if not len(rows):
            return
        found = experts[rows] if self.held is None else self.held[experts[rows]]
        order, tiles = tiles_of(slots[rows] * count + found)
        a, b = factors.a.flatten(0, 1).unsqueeze(1), factors.b.flatten(0, 1)
        scales = factors.scales.repeat_interleave(count, 0)
        x = x if isinstance(x, Tensor) else x()
        where = rows[order].to(torch.int32), tiles
        lora_linear(y, x, a, b, scales, (0, y.shape[1]), *where)
