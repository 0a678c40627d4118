"""The inputs of captured steps with prompt tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rollout.engine.worker.graphs.captured_parts import CapturedParts
from rollout.engine.worker.graphs.input_memory import InputMemory
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
        parts: CapturedParts | None = None,
    ) -> None:
        self.tokens, self.sequences, self.max_blocks = tokens, sequences, max_blocks
        self._groups = (groups,) if groups > 1 else ()
        self._parts = parts or CapturedParts()
        fields = {
            "input_ids": ((tokens,), torch.int64),
            "positions": ((tokens,), torch.int64),
            "slot_mapping": ((*self._groups, tokens), torch.int64),
            "logit_rows": ((_ROWS * tokens,), torch.int64),
            "query_starts": ((sequences + 1,), torch.int32),
            "context_lens": ((sequences,), torch.int32),
            **self._parts.fields(tokens, sequences),
        }
        there = self._parts.there(tokens)
        self._memory = InputMemory(fields, sequences, max_blocks, device, groups, there)
        self._every = torch.arange(tokens, device=device)
        self._memory.host["slot_mapping"][...] = -1
        self._parts.clear(self._memory)
        self._memory.move()

    def shape_of(self, batch: ForwardBatch) -> tuple[int, bool] | None:
        """Tokens of a batch (CPU), and whether it has few a sequence; None: it does not fit."""
        *groups, count, width = batch.block_tables.shape
        if not self._parts.hold(batch) or tuple(groups) != self._groups:
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
        host = self._memory.host
        here = batch.input_ids.device.type == "cpu"
        host["input_ids"][:tokens] = batch.input_ids.numpy() if here else 0
        host["positions"][:tokens] = batch.positions.numpy()
        host["slot_mapping"][..., :tokens] = batch.slot_mapping.numpy()
        host["logit_rows"][:wanted] = batch.logit_rows.numpy()
        host["query_starts"][: count + 1] = batch.query_starts.numpy()
        host["context_lens"][:count] = batch.context_lens.numpy()
        padding = slice(tokens, shape.tokens)
        host["input_ids"][padding] = host["positions"][padding] = 0
        host["slot_mapping"][..., padding] = -1
        host["query_starts"][count + 1 : shape.sequences + 1] = tokens
        host["context_lens"][count : shape.sequences] = 0
        self._parts.fill(self._memory, batch, *shape)
        self._memory.block_rows[..., :count, :width] = batch.block_tables.numpy()
        self._memory.move(count, batch.input_ids)
        return self._memory.device["logit_rows"][:wanted]

    def batch(self, shape: PrefillShape) -> ForwardBatch:
        """The inputs of that shape, on the device; ``logit_rows`` are all of its tokens."""
        there = self._memory.device
        batch = ForwardBatch(
            input_ids=there["input_ids"][: shape.tokens],
            positions=there["positions"][: shape.tokens],
            slot_mapping=there["slot_mapping"][..., : shape.tokens],
            query_starts=there["query_starts"][: shape.sequences + 1],
            context_lens=there["context_lens"][: shape.sequences],
            block_tables=self._memory.tables[..., : shape.sequences, :],
            logit_rows=self._every[: shape.tokens],
        )
        return self._parts.join(batch, there)
