"""A step's arrays, made from those of the step before where that was the same but one token."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.sampling.metadata import Ints
from rollout.engine.sequences.sequence import ScheduledBatch, Sequence
from rollout.engine.steps.batch import encode_batch, pages_at, tables_of

Encoded = tuple[dict[str, Any], dict[str, Tensor]]
_sequence, _num_new = attrgetter("sequence"), attrgetter("num_new")
_token_ids, _block_table = attrgetter("token_ids"), attrgetter("block_table")
_num_computed = attrgetter("num_computed")
#: what differs from one decode step to the next
_MOVES = frozenset(
    ("input_ids", "positions", "slot_mapping", "context_lens", "block_tables", "counters")
)
#: what steps have beside it whose sequences bring more than a token
_MORE = frozenset(("hidden_sums", "expert_slots", "forced_experts", "adapter_rows", "state_slots"))


class BatchEncoder:
    """``encode_batch``, in a fraction of its time while the same sequences decode.

    Once they have taken two steps, what their settings make is kept, and so are their block tables,
    of which a step changes some rows. Whatever else comes is encoded as a whole.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._kept: _Kept | None = None
        self._last: list[Sequence] = []  # of the last step

    def encode(self, batch: ScheduledBatch) -> Encoded:
        """As ``encode_batch``; tensors of several steps may share memory, which stays as it is."""
        sequences = list(map(_sequence, batch.entries))
        kept = None if batch.runs_draft else self._kept
        if kept is not None and sequences == kept.sequences:
            again = kept.step(batch)
            if again is not None:
                return again
        last, self._last, self._kept = self._last, [], None
        encoded = encode_batch(batch, self.block_size)
        if sequences and sequences == last and not batch.runs_draft:
            self._kept = _Kept.of(batch, sequences, encoded[1], self.block_size)
        self._last = sequences
        return encoded


@dataclass(slots=True, eq=False)
class _Kept:
    """Of sequences that decode, and all draw by settings that their tokens do not change."""

    sequences: list[Sequence]
    tokens: list[list[int]]  # their ``token_ids``, which only grow
    tables: list[list[int]]  # ``tables_of`` them, as far as they are in ``rows``
    lengths: list[int]  # of those
    rows: NDArray[np.int32]  # [(groups x) sequences, as many blocks as there may be for a while]
    block_size: int
    same: dict[str, Tensor]  # of every step
    places: Ints  # 0, 1, 2 ...
    ones: list[int]

    @classmethod
    def of(
        cls,
        batch: ScheduledBatch,
        sequences: list[Sequence],
        tensors: dict[str, Tensor],
        block_size: int,
    ) -> _Kept | None:
        """``tensors``: of a step of them; None: the next one may differ in more than a token."""
        count, coming = len(sequences), batch.previous_rows is not None
        decodes = all(entry.num_new == 1 for entry in batch.entries)
        drawn = len(tensors["logit_rows"]) == len(tensors.get("top_k", ())) == count
        if not (decodes and drawn) or not _MORE.isdisjoint(tensors):
            return None
        if not all(_is_steady(sequence, coming) for sequence in sequences):
            return None
        tables = tables_of(sequences)
        known = tensors["block_tables"].flatten(0, -2).numpy()
        rows = np.zeros((len(tables), known.shape[1] + 16), np.int32)
        rows[:, : known.shape[1]] = known
        same = {
            name: tensor
            for name, tensor in tensors.items()
            if name not in _MOVES and name != "previous_rows"
        }
        return cls(
            sequences, list(map(_token_ids, sequences)), tables, list(map(len, tables)),
            rows, block_size, same, np.arange(count), [1] * count,
        )  # fmt: skip

    def step(self, batch: ScheduledBatch) -> Encoded | None:
        """Encode the next one; None: it is none of these any more."""
        count, ahead = len(self.sequences), batch.previous_rows
        tables = list(map(_block_table, self.sequences))
        if list(map(_num_new, batch.entries)) != self.ones or not all(
            starmap(is_, zip(tables, self.tables, strict=False))  # others are new with the first
        ):
            return None
        known = np.fromiter(map(len, self.tokens), np.int64, count)
        if ahead is not None:
            known += 1
        else:
            computed = np.fromiter(map(_num_computed, self.sequences), np.int64, count)
            if not np.array_equal(computed + 1, known):
                return None  # a chunk of one token
        if not self._grow():
            return None
        positions, size = known - 1, self.block_size
        rows = self.rows
        if len(rows) > count:
            rows = rows.reshape(-1, count, rows.shape[1])
        pages = pages_at(rows, self.places, positions // size)
        moves = {
            "input_ids": self._newest(count, ahead),
            "positions": positions,
            "slot_mapping": pages * size + positions % size,
            "context_lens": known.astype(np.int32),
            "block_tables": rows[..., : max(self.lengths)].copy(),
            "counters": known,
        }
        tensors = {**self.same, **{name: torch.from_numpy(x) for name, x in moves.items()}}
        if ahead is not None:
            tensors["previous_rows"] = torch.tensor(ahead)
        return {"version": batch.version, "number": batch.number}, tensors

    def _newest(self, count: int, ahead: list[int] | None) -> Ints:
        if ahead is not None:
            return np.full(count, -1)
        return np.fromiter([tokens[-1] for tokens in self.tokens], np.int64, count)

    def _grow(self) -> bool:
        """Take over the blocks that have come; False where a table has shrunk."""
        lengths = list(map(len, self.tables))
        if lengths == self.lengths:
            return True
        longest = max(lengths)
        if longest > self.rows.shape[1]:
            wider = np.zeros((len(lengths), longest + 16), np.int32)
            wider[:, : self.rows.shape[1]] = self.rows
            self.rows = wider
        for row, (new, old) in enumerate(zip(lengths, self.lengths, strict=True)):
            if new < old:
                return False
            if new > old:
                self.rows[row, old:new] = self.tables[row][old:]
        self.lengths = lengths
        return True


def _is_steady(sequence: Sequence, coming: int) -> bool:
    """Whether its settings stay the same with every token, and so does how it is placed."""
    early = sequence.params.min_tokens > sequence.output_len + coming
    return not (early or sequence.reads_tokens or sequence.visual_positions is not None)
