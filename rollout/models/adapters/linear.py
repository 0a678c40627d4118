"""What lies beside one linear in the slots of adapters, for all instances of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from rollout.kernels import lora_linear
from rollout.models.adapters.model import AdaptedLinear
from rollout.models.model import Model
from rollout.weights import WeightSlot
from rollout.weights.adapters import BIASED, DORA, DORA_EMBEDDING, EMBEDDING, LINEAR


@dataclass(slots=True)
class ActiveRows:
    """The rows of the step at hand that have adapters; None: no row has one.

    ``normed``: those of DoRA, and the slot of each. ``plain``: none has more than two factors, as
    in captured steps.
    """

    rows: Tensor | None = None
    tiles: Tensor | None = None
    slot_of: Tensor | None = None
    normed: tuple[Tensor, Tensor] | None = None
    tokens: Tensor | None = None  # see ``of_tokens``
    plain: bool = False

    def begin(self, rows: Tensor | None, tiles: Tensor | None) -> None:
        """Other rows, of which nothing has been derived."""
        self.rows, self.tiles = rows, tiles
        self.slot_of = self.normed = self.tokens = None

    def slot_of_rows(self, tiles: Tensor) -> Tensor:
        """int64: the slot of each of ``rows``."""
        if self.slot_of is None:
            slots, starts, stops = tiles.long().unbind(1)
            self.slot_of = torch.repeat_interleave(slots, stops - starts)
        return self.slot_of

    def of_tokens(self, count: int) -> Tensor | None:
        """int64 [count]: of each row of the step its slot, or -1; None: no row has one."""
        if self.rows is None or self.tiles is None:
            return None
        if self.tokens is None:
            self.tokens = torch.full((count,), -1, device=self.rows.device)
            self.tokens[self.rows.long()] = self.slot_of_rows(self.tiles)
        return self.tokens


class LinearAdapters:
    """What all slots hold for one linear; ``add`` puts it behind the linear's own product.

    a: [slots, parts, rank, inputs of this rank], b: [slots, rank, outputs of this rank],
    magnitudes: float32 [slots, outputs of this rank], biases: [slots, outputs of this rank],
    scales: float32 [slots, parts]. A part is what one source of the linear's weight fills.
    ``is_cut``: ranks have parts of the inputs. ``adds_bias``: this one adds what all add once.
    ``biased``: the slots that have any. ``kinds``: of ``ModuleSpec`` that it can hold.
    """

    kinds: ClassVar[tuple[str, ...]] = (LINEAR, DORA, BIASED)

    def __init__(
        self,
        base: list[list[WeightSlot]],
        a: Tensor,
        b: Tensor,
        active: ActiveRows,
        is_cut: bool,
        adds_bias: bool = True,
    ) -> None:
        self.base, self.a, self.b, self.active, self.is_cut = base, a, b, active, is_cut
        self.adds_bias, self.biased = adds_bias, set[int]()
        self.biases = torch.zeros(a.shape[0], b.shape[2], dtype=b.dtype, device=b.device)
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
        return self.a, self.b, self.magnitudes, self.biases

    def of(self, slot: int) -> AdaptedLinear:
        return AdaptedLinear(
            base=self.base,
            a=self.a[slot],
            b=self.b[slot],
            magnitudes=self.magnitudes[slot],
            biases=self.biases[slot],
            scales=self.scales[slot],
        )

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """``y`` [T, outputs], with what adapters make of the rows of ``x`` [T, inputs] in it."""
        active = self.active
        if active.rows is not None and active.tiles is not None:
            lora_linear(
                y, x, self.a, self.b, self.scales, self.bounds, active.rows, active.tiles
            )  # fmt: skip
            if self.biased and self.adds_bias and not active.plain:
                self._add_biases(y, active.rows.long(), active.slot_of_rows(active.tiles))
        return y

    def _add_biases(self, y: Tensor, rows: Tensor, slots: Tensor) -> None:
        chosen = torch.isin(slots, torch.tensor([*self.biased], device=slots.device))
        rows, slots = rows[chosen], slots[chosen]
        sizes = torch.tensor(self.bounds, device=y.device).diff()
        scales = self.scales[slots].repeat_interleave(sizes, dim=1)
        y[rows] = (y[rows].float() + self.biases[slots].float() * scales).to(y.dtype)

    def weight(self, model: Model, part: WeightSlot) -> Tensor:
        """[outputs, inputs] of this rank of a slot of ``base``, as ``model`` has them."""
        return model.read_slot(part)


class EmbeddingAdapters(LinearAdapters):
    """The same of an embedding, whose inputs are this rank's part of the vocabulary."""

    kinds: ClassVar[tuple[str, ...]] = (EMBEDDING, DORA_EMBEDDING)

    def __init__(
        self, own: WeightSlot, base: WeightSlot, a: Tensor, b: Tensor, active: ActiveRows,
        is_cut: bool,
    ) -> None:  # fmt: skip
        """``own``: the slot of the embedding, ``base``: the same with its dimensions turned."""
        super().__init__([[base]], a, b, active, is_cut)
        self._own = own
        count, rank = b.shape[:2]
        self._eye = torch.eye(rank, dtype=b.dtype, device=b.device).expand(count, 1, -1, -1)
        self._eye = self._eye.contiguous()

    def weight(self, model: Model, part: WeightSlot) -> Tensor:
        return model.read_slot(self._own).t()

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """``x``: ids [T] within this rank's part, of the rows of ``y`` [T, hidden size]."""
        active = self.active
        if active.rows is None or active.tiles is None:
            return y
        slots, rows = active.slot_of_rows(active.tiles), active.rows.long()
        taken = y.new_zeros(len(y), self.b.shape[1])
        taken[rows] = self.a[slots, 0, :, x[rows]]
        lora_linear(
            y, taken, self._eye, self.b, self.scales, self.bounds, active.rows, active.tiles
        )  # fmt: skip
        return y
