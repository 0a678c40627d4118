"""What captured steps of some models have beside tokens and pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rollout.engine.worker.graphs.input_memory import Fields, InputMemory
from rollout.kernels.lora_linear import TILE
from rollout.models.forward import ForwardBatch


@dataclass(frozen=True, slots=True)
class CapturedParts:
    """``states``: the slot of each sequence's recurrent states, of padding -1. ``adapters``: which
    rows have one of so many of them, if any has; of a step without, no tile has a row. 0: steps
    with adapters are not captured. ``before``: elements, and their dtype, of what a prediction head
    reads before each token, which lies on the device alone.
    """

    states: bool = False
    adapters: int = 0
    before: tuple[int, torch.dtype] | None = None

    def fields(self, tokens: int, sequences: int) -> Fields:
        """Of a step of at most so many."""
        found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.states:
            found["state_slots"] = (sequences,), torch.int32
        if self.adapters:
            found["adapter_rows"] = (tokens,), torch.int32
            found["adapter_tiles"] = (self._tiles(tokens), 3), torch.int32
        return found

    def there(self, tokens: int) -> Fields:
        """Of a step of at most so many, what no host has."""
        if self.before is None:
            return {}
        size, dtype = self.before
        return {"before": ((tokens, size), dtype)}

    def hold(self, batch: ForwardBatch) -> bool:
        """Whether ``batch`` (CPU) has nothing else beside tokens and pages."""
        told = batch.visual is None and batch.forced_experts is None
        plain = told and batch.positions.dim() == 1
        adapts = self.adapters or batch.adapter_rows is None
        has = self.states, self.before is not None
        told_of = batch.state_slots is not None, batch.before is not None
        return bool(plain and adapts and has == told_of)

    def clear(self, memory: InputMemory) -> None:
        """All is padding."""
        if self.states:
            memory.host["state_slots"][...] = -1

    def fill(self, memory: InputMemory, batch: ForwardBatch, tokens: int, sequences: int) -> None:
        """Of a step that is padded to so many."""
        host = memory.host
        if batch.before is not None:
            before = memory.device["before"][: len(batch.before)]
            if before.data_ptr() != batch.before.data_ptr():  # else the step before has left it
                before.copy_(batch.before)
        if batch.state_slots is not None:
            count = len(batch.state_slots)
            host["state_slots"][:count] = batch.state_slots.numpy()
            host["state_slots"][count:sequences] = -1
        if self.adapters:
            count = 0
            if batch.adapter_rows is not None and batch.adapter_tiles is not None:
                count = len(batch.adapter_tiles)
                host["adapter_rows"][: len(batch.adapter_rows)] = batch.adapter_rows.numpy()
                host["adapter_tiles"][:count] = batch.adapter_tiles.numpy()
            host["adapter_tiles"][count : self._tiles(tokens)] = 0

    def join(self, batch: ForwardBatch, device: Mapping[str, Tensor]) -> ForwardBatch:
        """A captured step's ``batch``, with what is in ``device`` of it."""
        tokens, sequences = len(batch.input_ids), len(batch.context_lens)
        if self.states:
            batch = replace(batch, state_slots=device["state_slots"][:sequences])
        if self.adapters:
            batch = replace(
                batch,
                adapter_rows=device["adapter_rows"][:tokens],
                adapter_tiles=device["adapter_tiles"][: self._tiles(tokens)],
            )
        if self.before is not None:
            batch = replace(batch, before=device["before"][:tokens])
        return batch

    def _tiles(self, tokens: int) -> int:
        """As many as so many tokens may have."""
        return min(tokens, tokens // TILE + self.adapters)
