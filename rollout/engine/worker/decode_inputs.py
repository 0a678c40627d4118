"""The inputs of captured decode steps."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.sampling.fused_sampler import row_numbers
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import uniforms
from rollout.engine.worker.input_memory import InputMemory
from rollout.models.forward import ForwardBatch


def is_decode(batch: ForwardBatch) -> bool:
    """Whether every sequence has one token and wants the logits after it; ``batch`` on the CPU."""
    count = len(batch.context_lens)
    if not count == len(batch.input_ids) == len(batch.logit_rows):
        return False
    steps = torch.arange(count + 1)
    return torch.equal(batch.query_starts.long(), steps) and torch.equal(
        batch.logit_rows, steps[:count]
    )


class DecodeInputs:
    """The inputs of decode steps, settings of the sampler included, in an ``InputMemory``.

    Padding rows have no slot, so they write nothing, and read the first position of block 0; what
    they draw is the likeliest. Of several ``groups`` each has slots and block tables of its own.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device, groups: int = 1) -> None:
        self.rows, self.max_blocks, self.groups = rows, max_blocks, groups
        self._memory = InputMemory(sum(_words(rows, groups)), rows, max_blocks, device, groups)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(rows, device=device)
        host = self._memory.host
        self._columns: list[NDArray[Any]] = [each.numpy() for each in self._views(host)]
        self._clear(0, rows)
        self._memory.device.copy_(host)

    def fits(self, batch: ForwardBatch) -> bool:
        count, width = batch.block_tables.shape[-2:]
        told = (batch.visual, batch.state_slots, batch.adapter_rows, batch.forced_experts)
        plain = batch.positions.dim() == 1 and all(one is None for one in told)
        return plain and count <= self.rows and width <= self.max_blocks

    def fill(
        self, batch: ForwardBatch, size: int, sampling: SamplingMetadata | None = None
    ) -> None:
        """Take over a decode batch (CPU) of at most ``size`` rows; the rest of them is padding.

        Its ``input_ids`` may be on the device already, where the step before has drawn them.
        ``sampling``: of its rows, which all draw; None: the settings on the device stay as they
        are.
        """
        self._memory.await_move()
        count, width = batch.block_tables.shape[-2:]
        ids, positions, slots, lengths, top_k, draws, numbers = self._columns
        here = batch.input_ids.device.type == "cpu"
        ids[:count] = batch.input_ids.numpy() if here else 0
        positions[:count] = batch.positions.numpy()
        slots[..., :count] = batch.slot_mapping.numpy()
        lengths[:count] = batch.context_lens.numpy()
        moved = _words(self.rows, self.groups)[0]
        if sampling is not None:
            moved = len(self._memory.host)
            top_k[:count], numbers[:count] = sampling.top_k, row_numbers(sampling)
            draws[:count] = uniforms(sampling.seeds, sampling.counters)
        self._clear(count, size)
        self._memory.block_rows[..., :count, :width] = batch.block_tables.numpy()
        self._memory.move(moved, count, batch.input_ids)

    def batch(self, size: int) -> ForwardBatch:
        """The first ``size`` rows, on the device."""
        ids, positions, slots, lengths, *_ = self._views(self._memory.device)
        return ForwardBatch(
            input_ids=ids[:size],
            positions=positions[:size],
            slot_mapping=slots[..., :size],
            query_starts=self._starts[: size + 1],
            context_lens=lengths[:size],
            block_tables=self._memory.tables[..., :size, :],
            logit_rows=self._logit_rows[:size],
        )

    def settings(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers, top_k and draws of the first ``size`` rows, on the device, as ``sample`` takes
        them.
        """
        *_, top_k, draws, numbers = self._views(self._memory.device)
        return numbers[:size], top_k[:size], draws[:size]

    def _clear(self, start: int, stop: int) -> None:
        ids, positions, slots, lengths, top_k, draws, numbers = self._columns
        for column in (ids, positions, top_k, draws, numbers):
            column[start:stop] = 0
        slots[..., start:stop], lengths[start:stop] = -1, 1
        self._memory.block_rows[..., start:stop, :1] = 0

    def _views(self, words: Tensor) -> list[Tensor]:
        """ids, positions, slots and lengths; top_k, draws and numbers."""
        n, groups = self.rows, self.groups
        model, sampler = torch.split(words, _words(n, groups))
        slots = model[2 * n : (2 + groups) * n]
        return [
            *(model[:n], model[n : 2 * n], slots if groups == 1 else slots.view(groups, n)),
            model[(2 + groups) * n :].view(torch.int32)[:n],
            *(sampler[:n], sampler[n : 2 * n].view(torch.float64)),
            sampler[2 * n :].view(torch.float32)[: 3 * n].view(n, 3),
        ]


def _words(rows: int, groups: int) -> list[int]:
    """How many of 8 bytes the model's inputs take, and the sampler's."""
    return [(2 + groups) * rows + -(-rows // 2), 2 * rows + -(-3 * rows // 2)]
