"""The slots of adapters as one instance of the model has them: with what follows of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rollout.kernels.lora_linear import tiles_of
from rollout.models.adapters.linear import ActiveRows, LinearAdapters
from rollout.models.forward import ForwardBatch
from rollout.models.model import Model
from rollout.weights import WeightSlot
from rollout.weights.adapters import NORMED, AdapterSpec

_AT_ONCE = 1 << 22  # elements of a weight that are widened at once


class InstanceAdapters:
    """What DoRA makes of the outputs of this instance's linears, slot by slot (arXiv 2402.09353).

    Each output of W + s B A is given the norm that ``magnitude`` says, so the product's is times
    magnitude / norm, a gain. What this rank has of the norms is ``derive``d as soon as weights or a
    slot have been loaded; ranks that have parts of the inputs add theirs up in the first step that
    needs a gain, which all of them run in lockstep.

    ``head``: the rows of the head's products, where adapters may change the vocabulary's layers.
    ``dora``: of slots with DoRA, which load it is, and of what. ``more``: the slots with anything
    that is not in two factors. ``attach``: as ``AdapterSlots``. ``captured``: how many slots there
    are, if a graph can hold steps with adapters, of which none has ``more``; else 0.
    """

    def __init__(
        self,
        active: ActiveRows,
        head: ActiveRows | None,
        linears: Mapping[str, LinearAdapters],
        dora: Mapping[int, tuple[int, AdapterSpec]],
        more: Set[int],
        attach: Callable[[Model], None],
        captured: int,
    ) -> None:
        self.captured, self._more = captured, more
        self._active, self._head, self.attach = active, head, attach
        self._slots_of_logits: Tensor | None = None
        self._linears, self._dora = linears, dora
        self.gains: dict[str, Tensor] = {}  # by linear: float32 [slots, outputs]
        self._squares: dict[int, tuple[int, dict[str, Tensor]]] = {}  # by slot: of this load
        self._ready: dict[int, int] = {}  # by slot: the load that its gains are of

    def weights_changed(self) -> None:
        """Nothing that was derived holds any more."""
        self._squares, self._ready = {}, {}

    def derive(self, model: Model) -> None:
        """Of this instance, ``model``, whose weights and slots are there; on any thread."""
        for slot, loaded in list(self._dora.items()):
            self._sums(model, slot, *loaded)

    def begin_step(self, model: Model, batch: ForwardBatch) -> None:
        """The next products are of this batch, whose tensors are on the slots' device, by
        ``model``, this instance; in lockstep on all ranks.
        """
        active = self._active
        active.begin(batch.adapter_rows, batch.adapter_tiles)
        self._slots_of_logits = None
        if active.rows is None or active.tiles is None or active.plain:
            return
        if not (self._dora or self._head):
            return
        slots = active.slot_of_rows(active.tiles)
        for slot in dict.fromkeys(active.tiles[:, 0].tolist()):
            if slot in self._dora:
                self._make_gains(model, slot)
        self._note_normed(active)
        if self._head is not None:
            slot_of = slots.new_full((len(batch.input_ids),), -1)
            slot_of[active.rows.long()] = slots
            self._slots_of_logits = slot_of[batch.logit_rows]

    def begin_head(self, first: int, count: int) -> None:
        """The head's next product is of ``count`` of the step's rows with logits."""
        head, slots = self._head, self._slots_of_logits
        if head is None:
            return
        head.begin(None, None)
        if slots is None:
            return
        slots = slots[first : first + count]
        rows = (slots >= 0).nonzero()[:, 0]
        order, tiles = tiles_of(slots[rows])
        if len(tiles):
            rows = rows[order]
            head.begin(rows.to(torch.int32), tiles)
            head.slot_of = slots[rows]
            self._note_normed(head)

    def are_plain(self, batch: ForwardBatch) -> bool:
        """Whether no row of ``batch`` (CPU) has an adapter with more than two factors."""
        tiles = batch.adapter_tiles
        return tiles is None or not self._more or self._more.isdisjoint(tiles[:, 0].tolist())

    @contextmanager
    def captured_steps(self) -> Iterator[None]:
        """Steps within it are captured: nothing may be read from the device, or depend on what
        slots hold now.
        """
        self._active.plain = True
        try:
            yield
        finally:
            self._active.plain = False
            self._active.begin(None, None)

    @contextmanager
    def idle(self) -> Iterator[None]:
        """No row has an adapter within it; the head's next product is of the step's rows again."""
        slots, self._slots_of_logits = self._slots_of_logits, None
        self._active.begin(None, None)
        try:
            yield
        finally:
            self._slots_of_logits = slots

    def _note_normed(self, active: ActiveRows) -> None:
        assert active.rows is not None
        assert active.tiles is not None
        known, slots = list(self._dora), active.slot_of_rows(active.tiles)
        if known:
            chosen = torch.isin(slots, torch.tensor(known, device=slots.device))
            if bool(chosen.any()):
                active.normed = active.rows[chosen].long(), slots[chosen]

    def _make_gains(self, model: Model, slot: int) -> None:
        load, spec = self._dora[slot]
        if self._ready.get(slot) == load:
            return
        squares = self._sums(model, slot, load, spec)
        cut = [name for name in squares if self._linears[name].is_cut]
        if cut:
            whole = model.tp.all_reduce(torch.cat([squares[name] for name in cut]))
            parts: Any = torch.split(whole, [len(squares[name]) for name in cut])
            squares = squares | dict(zip(cut, parts, strict=True))
        for gains in self.gains.values():
            gains[slot] = 1.0
        for name, found in squares.items():
            held = self._linears[name].magnitudes
            gains = self.gains.setdefault(name, torch.ones_like(held))
            for part in self._normed(name, spec):
                rows = part.put.slices[0]
                gains[slot, rows] = held[slot, rows] / found[rows].sqrt()
        self._ready[slot] = load

    def _sums(self, model: Model, slot: int, load: int, spec: AdapterSpec) -> dict[str, Tensor]:
        """By linear with DoRA in this slot: float32 [outputs], the squares of this rank's inputs of
        W + s B A, added up; of this load, after which steps may bring another one meanwhile.
        """
        known = self._squares.get(slot)
        if known is not None and known[0] == load:
            return known[1]
        found = {}
        for name, linear in self._linears.items():
            if parts := self._normed(name, spec):
                sums = found[name] = torch.zeros_like(linear.magnitudes[slot])
                for part in parts:
                    self._add_squares(model, linear, slot, part, sums)
        self._squares[slot] = load, found
        return found

    def _normed(self, name: str, spec: AdapterSpec) -> list[WeightSlot]:
        """The slots of a linear's weight whose outputs have magnitudes."""
        modules = spec.modules
        return [
            each
            for part in self._linears[name].base
            for each in part
            if (of := modules.get(each.source.removesuffix(".weight"))) and of.kind in NORMED
        ]

    def _add_squares(
        self, model: Model, linear: LinearAdapters, slot: int, part: WeightSlot, sums: Tensor
    ) -> None:
        index = next(i for i, of in enumerate(linear.base) if part in of)
        rows = part.put.slices[0]
        weight = linear.weight(model, part)
        up = linear.b[slot][:, rows].float() * linear.scales[slot, index]
        down = linear.a[slot, index].float()
        step = max(1, _AT_ONCE // weight.shape[1])
        for first in range(0, len(weight), step):
            some = slice(first, first + step)
            adapted = torch.addmm(weight[some].float(), up[:, some].t(), down)
            sums[rows][some] = adapted.square_().sum(1)


class BesideLinear:
    """What adapters do at one linear of an instance."""

    def __init__(self, name: str, linear: LinearAdapters, adapters: InstanceAdapters) -> None:
        self._name, self._linear, self._adapters = name, linear, adapters

    @property
    def is_idle(self) -> bool:
        """Whether no row of this step has an adapter."""
        return self._linear.active.rows is None

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        return self._linear.add(y, x)

    def scale(self, y: Tensor, bias: Tensor | None = None) -> Tensor:
        """``y`` [T, outputs], complete but for other ranks' parts, as DoRA's norms have it, in
        place; ``bias`` is in it and stays as it is.
        """
        normed, gains = self._linear.active.normed, self._adapters.gains.get(self._name)
        if normed is None or gains is None:
            return y
        rows, slots = normed
        taken = y[rows].to(torch.promote_types(y.dtype, torch.float32))
        if bias is None:
            taken *= gains[slots]
        else:
            taken = (taken - bias) * gains[slots] + bias
        y[rows] = taken.to(y.dtype)
        return y
