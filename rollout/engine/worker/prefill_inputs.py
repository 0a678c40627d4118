"""The inputs of captured steps with prompt tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.worker.input_memory import InputMemory
from rollout.kernels.paged_attention import has_few_queries
from rollout.models.forward import ForwardBatch

_SMALLEST = 16  # tokens of the smallest size
_MEMORY_BOUND = 128  # tokens up to which a step costs about what reading the weights does
_ROWS = 3  # a token may be drawn behind, scored, and bring its hidden state


class PrefillShape(NamedTuple):
    """What a captured step has room for."""

    tokens: int
    sequences: int


def prefill_sizes(most: int) -> tuple[int, ...]:
    """16, 32, 64, 128, 192, 256, 384, ... and ``most``: numbers of tokens, at most half of them
    padding, and of more than 128 at most a third.
    """
    sizes, power = {most} if most else set(), _SMALLEST
    while power < most:
        sizes |= {power, *([power + power // 2] if power >= _MEMORY_BOUND else [])}
        power *= 2
    return tuple(sorted(size for size in sizes if size <= most))


def prefill_shapes(most: int, max_num_seqs: int) -> tuple[PrefillShape, ...]:
    """Of every size one shape for steps of many tokens a sequence and one for those of few, which
    another kernel attends for (``has_few_queries``, of the shape as of the steps it is for). Each
    step of at most ``most`` tokens and ``max_num_seqs`` sequences has one.
    """
    sizes, shapes = prefill_sizes(most), []
    for smaller, size in zip((0, *sizes), sizes, strict=False):
        many = min((size - 1) // 2, max_num_seqs)
        if many:
            shapes.append(PrefillShape(size, many))
        if smaller < 2 * max_num_seqs:
            shapes.append(PrefillShape(size, max(-(-size // 2), min(size, max_num_seqs))))
    return tuple(shapes)


class PrefillInputs:
    """The inputs of a step, in an ``InputMemory``.

    Padding tokens belong to no sequence: they have no slot, so they write nothing, and attend to
    nothing. Padding sequences have no tokens. Of several ``groups`` of layers each has slots and
    block tables of its own: both have one more dimension in front.
    """

    def __init__(
        self,
        tokens: int,
        sequences: int,
        max_blocks: int,
        device: torch.device,
        groups: int = 1,
    ) -> None:
        self.tokens, self.sequences, self.max_blocks = tokens, sequences, max_blocks
        self._groups = (groups,) if groups > 1 else ()
        self._words = [tokens, tokens, groups * tokens, _ROWS * tokens, sequences + 1]
        self._memory = InputMemory(sum(self._words), sequences, max_blocks, device, groups)
        self._every = torch.arange(tokens, device=device)
        host = self._memory.host
        self._columns: list[NDArray[Any]] = [each.numpy() for each in self._views(host)]
        self._columns[2][...] = -1
        self._memory.device.copy_(host)

    def shape_of(self, batch: ForwardBatch) -> tuple[int, bool] | None:
        """Tokens of a batch (CPU), and whether it has few a sequence; None: it does not fit."""
        told = (batch.visual, batch.state_slots, batch.adapter_rows, batch.forced_experts)
        *groups, count, width = batch.block_tables.shape
        plain = batch.positions.dim() == 1 and all(one is None for one in told)
        if not plain or tuple(groups) != self._groups:
            return None
        tokens = len(batch.input_ids)
        if tokens > self.tokens or count > self.sequences or width > self.max_blocks:
            return None
        return tokens, has_few_queries(tokens, count)

    def fill(self, batch: ForwardBatch, shape: PrefillShape) -> Tensor:
        """Take over a batch (CPU) for which ``shape`` has room; the rest of it is padding.

        Its ``input_ids`` may be on the device already. Returns its ``logit_rows`` on the device,
        valid until the next call.
        """
        self._memory.await_move()
        *_, count, width = batch.block_tables.shape
        tokens, wanted = len(batch.input_ids), len(batch.logit_rows)
        ids, positions, slots, rows, starts, lengths = self._columns
        here = batch.input_ids.device.type == "cpu"
        ids[:tokens] = batch.input_ids.numpy() if here else 0
        positions[:tokens] = batch.positions.numpy()
        slots[..., :tokens] = batch.slot_mapping.numpy()
        rows[:wanted] = batch.logit_rows.numpy()
        starts[: count + 1] = batch.query_starts.numpy()
        lengths[:count] = batch.context_lens.numpy()
        ids[tokens : shape.tokens] = positions[tokens : shape.tokens] = 0
        slots[..., tokens : shape.tokens] = -1
        starts[count + 1 : shape.sequences + 1] = tokens
        lengths[count : shape.sequences] = 0
        self._memory.block_rows[..., :count, :width] = batch.block_tables.numpy()
        self._memory.move(sum(self._words), count, batch.input_ids)
        return self._views(self._memory.device)[3][:wanted]

    def batch(self, shape: PrefillShape) -> ForwardBatch:
        """The inputs of that shape, on the device; ``logit_rows`` are all of its tokens."""
        ids, positions, slots, _, starts, lengths = self._views(self._memory.device)
        return ForwardBatch(
            input_ids=ids[: shape.tokens],
            positions=positions[: shape.tokens],
            slot_mapping=slots[..., : shape.tokens],
            query_starts=starts[: shape.sequences + 1],
            context_lens=lengths[: shape.sequences],
            block_tables=self._memory.tables[..., : shape.sequences, :],
            logit_rows=self._every[: shape.tokens],
        )

    def _views(self, words: Tensor) -> list[Tensor]:
        """ids, positions, slots and rows of logits, int64; starts and lengths, int32."""
        ids, positions, slots, rows, narrow = torch.split(words, self._words)
        counts = [self.sequences + 1, self.sequences]
        short = torch.split(narrow.view(torch.int32)[: sum(counts)], counts)
        return [ids, positions, slots.view(*self._groups, self.tokens), rows, *short]
