"""Which sequences of a step run together through modules that attend by themselves.

Such modules take rows of equally many tokens over one cache: prefills of equal length, chunks of
equal length behind as many tokens, and all sequences that decode, whose shorter contexts are padded
at the left under a mask. What the modules of a model bear is found out after its first load.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from rollout.models.forward import ForwardBatch

CELLS = 1 << 20  # most queries x keys of a pass with several sequences: scores lie in memory
SHORT = 256  # tokens: contexts up to here are padded to one another, longer ones up to twice


class Together(IntEnum):
    """Sequences that a pass may have."""

    PADDED = 0  # those that decode, at whatever length
    EQUAL = 1  # of equal contexts
    ONE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """``tokens`` [sequences, T]: of the step; ``past``: what each sequence has before them."""

    sequences: tuple[int, ...]
    tokens: Tensor
    past: tuple[int, ...]

    @property
    def padding(self) -> Tensor | None:
        """[sequences]: how much shorter each context is than the longest; None if none is."""
        longest = max(self.past)
        if min(self.past) == longest:
            return None
        return longest - torch.tensor(self.past, device=self.tokens.device)

    @property
    def context(self) -> int:
        """Tokens of the longest, these included."""
        return max(self.past) + self.tokens.shape[1]


def passes(
    batch: ForwardBatch, together: Together, *, paged: bool, token_wise: bool
) -> Iterator[Pass]:
    """Every token of ``batch`` once.

    ``paged``: there are keys, whose number tells sequences apart; else ``past`` says whether there
    is a state. ``token_wise``: what follows on one goes one token after the other.
    """
    starts, contexts = batch.query_starts.tolist(), batch.context_lens.tolist()
    kinds: dict[tuple[int, ...], list[tuple[int, int]]] = defaultdict(list)
    for number, context in enumerate(contexts):
        count = starts[number + 1] - starts[number]
        past = context - count
        past = past if paged else min(past, 1)  # a state is as large behind any
        alike = _alike(count, past, together, token_wise)
        kinds[(count, *alike, number if together is Together.ONE else 0)].append((past, number))
    for (count, *_), found in kinds.items():
        for group in _cut(sorted(found, reverse=True), count):
            first = torch.tensor([starts[number] for _, number in group])
            tokens = first[:, None] + torch.arange(count)
            width = 1 if token_wise and group[0][0] else count
            for at in range(0, count, width):
                yield Pass(
                    sequences=tuple(number for _, number in group),
                    tokens=tokens[:, at : at + width].to(batch.input_ids.device),
                    past=tuple(past + at for past, _ in group),
                )


def _alike(count: int, past: int, together: Together, token_wise: bool) -> tuple[int, ...]:
    """What sequences that run together have in common beside the ``count`` of their tokens."""
    if past and together is Together.PADDED and (count == 1 or token_wise):
        return (1,)
    return (1, past) if past else (0,)


def _cut(group: list[tuple[int, int]], count: int) -> Iterator[list[tuple[int, int]]]:
    """``group``, of falling lengths, in parts that have room and are not mostly padding."""
    part: list[tuple[int, int]] = []
    for past, number in group:
        if part:
            longest = part[0][0] + count
            full = (len(part) + 1) * count * longest > CELLS
            if full or max(past + count, SHORT) * 2 < longest:
                yield part
                part = []
        part.append((past, number))
    yield part
