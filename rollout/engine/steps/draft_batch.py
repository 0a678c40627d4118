"""What the draft model computes in a step: laid out by the core, taken up on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.sampling.metadata import Ints
from rollout.engine.sequences.sequence import ScheduledEntry
from rollout.models.forward import ForwardBatch

_PREFIX = "draft_"


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Known tokens of ``D`` sequences, and how many tokens are to be drafted after those.

    The longest drafts come first. ``places``: where, of the step's input ids, a draft goes;
    ``rows``: which row of the step's logits draws what its first token is a guess of.
    """

    input_ids: Tensor  # [tokens] int64
    positions: Tensor  # [tokens] int64
    slot_mapping: Tensor  # [tokens] int64
    query_starts: Tensor  # [D + 1] int32
    block_tables: Tensor  # [D, blocks] int32
    counts: Tensor  # [D] int64
    places: Tensor  # [D] int64
    rows: Tensor  # [D] int64

    @classmethod
    def of(
        cls,
        entries: list[ScheduledEntry],
        query_starts: Ints,
        rows: Ints,
        tables: NDArray[np.int32],
        block_size: int,
    ) -> DraftBatch:
        """``query_starts`` and ``tables``: of the step's entries; ``rows``: the first one that each
        draws by.
        """
        order = [i for i, entry in enumerate(entries) if entry.draft_context]
        order.sort(key=lambda i: -len(entries[i].drafts))
        chosen = [entries[i] for i in order]
        contexts = [entry.draft_context for entry in chosen]
        tokens = [
            e.sequence.token_ids[c.start + e.draft_ahead : c.stop + e.draft_ahead]
            for e, c in zip(chosen, contexts, strict=True)
        ]
        counts = np.array([len(entry.drafts) for entry in chosen], np.int64)
        lengths = [len(context) for context in contexts]
        positions = np.array([*chain.from_iterable(contexts)], np.int64)
        ends = [c.stop + len(e.drafts) for c, e in zip(contexts, chosen, strict=True)]
        own = tables[order, : -(-max(ends) // block_size)]
        pages = own[np.repeat(np.arange(len(order)), lengths), positions // block_size]
        arrays = {
            "input_ids": np.array([*chain.from_iterable(tokens)], np.int64),
            "positions": positions,
            "slot_mapping": pages.astype(np.int64) * block_size + positions % block_size,
            "query_starts": np.cumsum([0, *lengths]).astype(np.int32),
            "block_tables": own,
            "counts": counts,
            "places": query_starts[1:][order] - counts,
            "rows": rows[order],
        }
        return cls(**{name: torch.from_numpy(array) for name, array in arrays.items()})

    def tensors(self) -> dict[str, Tensor]:
        return {f"{_PREFIX}{f.name}": getattr(self, f.name) for f in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> DraftBatch | None:
        """None: nothing is drafted by a model."""
        if f"{_PREFIX}input_ids" not in tensors:
            return None
        return cls(**{f.name: tensors[f"{_PREFIX}{f.name}"] for f in fields(cls)})

    def forwards(self, drawn: list[Tensor], block_size: int) -> Iterator[ForwardBatch]:
        """The draft model's forward passes, one for each token of the longest draft, and one where
        nothing is to be drafted; before the next is asked for, ``drawn`` has to have what the last
        one drew, of all whose drafts are that long.
        """
        starts = self.query_starts.long()
        last = self.positions[starts[1:] - 1]
        count = int((self.counts > 0).sum())
        yield ForwardBatch(
            input_ids=self.input_ids,
            positions=self.positions,
            slot_mapping=self.slot_mapping,
            query_starts=self.query_starts,
            context_lens=(last + 1).int(),
            block_tables=self.block_tables,
            logit_rows=starts[1 : count + 1] - 1,
        )
        for step in range(1, int(self.counts.max())):
            count = int((self.counts > step).sum())
            positions, tables = last[:count] + step, self.block_tables[:count]
            pages = tables.gather(1, (positions // block_size)[:, None])[:, 0].long()
            yield ForwardBatch(
                input_ids=drawn[-1][:count],
                positions=positions,
                slot_mapping=pages * block_size + positions % block_size,
                query_starts=torch.arange(count + 1, dtype=torch.int32),
                context_lens=(positions + 1).int(),
                block_tables=tables,
                logit_rows=torch.arange(count),
            )

    def drafting(self, step: int) -> Tensor:
        """[drafts longer than ``step``]: the rows of the step's logits that draw what is guessed
        then.
        """
        return self.rows[self.counts > step] + step

    def fill(self, input_ids: Tensor, drawn: list[Tensor]) -> Tensor:
        """The step's input ids with the drafts in their places."""
        filled = input_ids.clone()
        for step, tokens in enumerate(drawn):
            filled[self.places[: len(tokens)] + step] = tokens.cpu()
        return filled
