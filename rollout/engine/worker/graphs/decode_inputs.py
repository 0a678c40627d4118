"""The inputs of captured decode steps."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.engine.sampling.fused_sampler import row_numbers
from rollout.engine.sampling.metadata import SamplingMetadata
from rollout.engine.sampling.sampler import uniforms
from rollout.engine.worker.graphs.captured_parts import CapturedParts
from rollout.engine.worker.graphs.input_memory import Fields, InputMemory
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

    def __init__(
        self,
        rows: int,
        max_blocks: int,
        device: torch.device,
        groups: int = 1,
        parts: CapturedParts | None = None,
    ) -> None:
        self.rows, self.max_blocks, self._parts = rows, max_blocks, parts or CapturedParts()
        model: Fields = {
            "input_ids": ((rows,), torch.int64),
            "positions": ((rows,), torch.int64),
            "slot_mapping": ((groups, rows) if groups > 1 else (rows,), torch.int64),
            "context_lens": ((rows,), torch.int32),
            **self._parts.fields(rows, rows),
        }
        sampler: Fields = {
            "top_k": ((rows,), torch.int64),
            "draws": ((rows,), torch.float64),
            "numbers": ((rows, 3), torch.float32),
        }
        self._last_of_model = list(model)[-1]
        fields, there = {**model, **sampler}, self._parts.there(rows)
        self._memory = InputMemory(fields, rows, max_blocks, device, groups, there)
        self._starts = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._logit_rows = torch.arange(rows, device=device)
        self._clear(0, rows)
        self._parts.clear(self._memory)
        self._memory.move()

    def fits(self, batch: ForwardBatch) -> bool:
        count, width = batch.block_tables.shape[-2:]
        return self._parts.hold(batch) and count <= self.rows and width <= self.max_blocks

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
        host = self._memory.host
        here = batch.input_ids.device.type == "cpu"
        host["input_ids"][:count] = batch.input_ids.numpy() if here else 0
        host["positions"][:count] = batch.positions.numpy()
        host["slot_mapping"][..., :count] = batch.slot_mapping.numpy()
        host["context_lens"][:count] = batch.context_lens.numpy()
        if sampling is not None:
            host["top_k"][:count] = sampling.top_k
            host["draws"][:count] = uniforms(sampling.seeds, sampling.counters)
            host["numbers"][:count] = row_numbers(sampling)
        self._clear(count, size)
        self._parts.fill(self._memory, batch, size, size)
        self._memory.block_rows[..., :count, :width] = batch.block_tables.numpy()
        last = self._last_of_model if sampling is None else None
        self._memory.move(count, batch.input_ids, last)

    def batch(self, size: int) -> ForwardBatch:
        """The first ``size`` rows, on the device."""
        there = self._memory.device
        batch = ForwardBatch(
            input_ids=there["input_ids"][:size],
            positions=there["positions"][:size],
            slot_mapping=there["slot_mapping"][..., :size],
            query_starts=self._starts[: size + 1],
            context_lens=there["context_lens"][:size],
            block_tables=self._memory.tables[..., :size, :],
            logit_rows=self._logit_rows[:size],
        )
        return self._parts.join(batch, there)

    def left(self, count: int) -> Tensor:
        """[count, elements]: what a head has left in the place of what it reads."""
        return self._memory.device["before"][:count]

    def settings(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Numbers, top_k and draws of the first ``size`` rows, on the device, as ``sample`` takes
        them.
        """
        there = self._memory.device
        return there["numbers"][:size], there["top_k"][:size], there["draws"][:size]

    def _clear(self, start: int, stop: int) -> None:
        host = self._memory.host
        for name in ("input_ids", "positions", "top_k", "draws", "numbers"):
            host[name][start:stop] = 0
        host["slot_mapping"][..., start:stop] = -1
        host["context_lens"][start:stop] = 1
        self._memory.block_rows[..., start:stop, :1] = 0
