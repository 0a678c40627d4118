"""What lies beside one linear in the slots of adapters, for all instances of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rollout.kernels import lora_linear
from rollout.models.adapter_model import AdaptedLinear
from rollout.weights import WeightSlot


@dataclass(slots=True)
class ActiveRows:
    """The rows of the step at hand that have adapters; None: no row has one.

    ``slot_of``: of each of them, where that is needed; ``normed``: those of DoRA, and the slot of
    each.
    """

    rows: Tensor | None = None
    tiles: Tensor | None = None
    slot_of: Tensor | None = None
    normed: tuple[Tensor, Tensor] | None = None
    tokens: Tensor | None = None  # see ``of_tokens``

    def of_tokens(self, count: int) -> Tensor | None:
        """int64 [count]: of each row of the step its slot, or -1; None: no row has one."""
        if self.rows is None or self.tiles is None:
            return None
        if self.tokens is None:
            slots, starts, stops = self.tiles.long().unbind(1)
            self.tokens = slots.new_full((count,), -1)
            self.tokens[self.rows.long()] = torch.repeat_interleave(slots, stops - starts)
        return self.tokens


class LinearAdapters:
    """What all slots hold for one linear; ``add`` puts it behind the linear's own product.

    a: [slots, parts, rank, inputs of this rank], b: [slots, rank, outputs of this rank],
    magnitudes: float32 [slots, outputs of this rank], scales: float32 [slots, parts]. A part is
    what one source of the linear's weight fills. ``is_cut``: ranks have parts of the inputs.
    """

    def __init__(
        self,
        base: list[list[WeightSlot]],
        a: Tensor,
        b: Tensor,
        active: ActiveRows,
        is_cut: bool,
    ) -> None:
        self.base, self.a, self.b, self.active, self.is_cut = base, a, b, active, is_cut
        made: dict[str, Any] = {"dtype": torch.float32, "device": a.device}
        self.magnitudes = torch.zeros(a.shape[0], b.shape[2], **made)
        self.scales = torch.zeros(a.shape[:2], **made)
        self.bounds = (0, *(part[-1].put.stops[0] for part in base))

    @property
    def modules(self) -> tuple[str, ...]:
        """Those of its parts, by the names in files."""
        return tuple(part[0].source.removesuffix(".weight") for part in self.base)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.a, self.b, self.magnitudes

    def of(self, slot: int) -> AdaptedLinear:
        return AdaptedLinear(
            base=self.base,
            a=self.a[slot],
            b=self.b[slot],
            magnitudes=self.magnitudes[slot],
            scales=self.scales[slot],
        )

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """``y`` [T, outputs], with what adapters make of the rows of ``x`` [T, inputs] in it."""
        active = self.active
        if active.rows is not None and active.tiles is not None:
            lora_linear(
                y, x, self.a, self.b, self.scales, self.bounds, active.rows, active.tiles
            )  # fmt: skip
        return y


class EmbeddingAdapters(LinearAdapters):
    """The same of an embedding, whose inputs are this rank's part of the vocabulary."""

    def __init__(
        self, base: list[list[WeightSlot]], a: Tensor, b: Tensor, active: ActiveRows
    ) -> None:
        super().__init__(base, a, b, active, False)
        count, rank = b.shape[:2]
        self._eye = torch.eye(rank, dtype=b.dtype, device=b.device).expand(count, 1, -1, -1)
        self._eye = self._eye.contiguous()

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """``x``: ids [T] within this rank's part, of the rows of ``y`` [T, hidden size]."""
        active = self.active
        if active.rows is None or active.tiles is None or active.slot_of is None:
            return y
        rows = active.rows.long()
        taken = y.new_zeros(len(y), self.b.shape[1])
        taken[rows] = self.a[active.slot_of, 0, :, x[rows]]
        lora_linear(
            y, taken, self._eye, self.b, self.scales, self.bounds, active.rows, active.tiles
        )  # fmt: skip
        return y
