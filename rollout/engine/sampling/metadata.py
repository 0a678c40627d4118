"""What the sampler needs to know about each row of logits, as plain arrays, and the logits
processors that read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory import to_device
from rollout.engine.sequences.sequence import Sequence
from rollout.generation import TOP_MODES

Floats = NDArray[np.float32]
Ints = NDArray[np.int64]

# Columns of ``numbers``.
TEMPERATURE, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY = range(6)
_numbers = attrgetter(
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_MASK = (1 << 64) - 1
_Column = TypeVar("_Column", Floats, Ints)


def _none() -> Floats:
    return np.empty(0, np.float32)


def _no_rows() -> Ints:
    return np.empty(0, np.int64)


def _no_pairs() -> Ints:
    return np.empty((0, 2), np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingMetadata:
    """Settings of the rows of one step's logits: ``S`` rows that draw, then ``P`` that score.

    A scoring row asks for the raw logprob of a known token (prompt logprobs), at a temperature of
    its own. Masks come first:
    those of grammars, where row ``mask_rows[i]`` may draw the tokens whose bit is set in
    ``mask_bits[i]`` (the lowest bit first), then ``allowed``. ``edits`` are added then: logit_bias,
    and minus infinity where min_tokens forbids stopping, and for bad words.
    ``seen_ids`` holds the tokens of rows with a penalty, each once, one row after the other: row
    ``seen_rows[i]`` has ``seen_ids[seen_starts[i]:seen_starts[i + 1]]``, and ``seen_counts`` says
    how often its output has each. All rows lists ascend.
    """

    numbers: Floats  # [S, 6] float32, columns as above
    top_k: Ints  # [S], 0: off
    seeds: Ints  # [S]
    counters: Ints  # [S]: position of the token that is drawn
    targets: Ints  # [P]: the known tokens
    num_top: Ints  # [S + P]: alternatives; 0: the token alone, -1: no report
    edit_rows: Ints = field(default_factory=_no_rows)  # [edits]
    edit_ids: Ints = field(default_factory=_no_rows)  # [edits]
    edit_values: Floats = field(default_factory=_none)  # [edits]
    seen_ids: Ints = field(default_factory=_no_rows)  # [tokens]
    seen_counts: Floats = field(default_factory=_none)  # [tokens]
    seen_rows: Ints = field(default_factory=_no_rows)  # [penalised]
    seen_starts: Ints = field(default_factory=lambda: np.zeros(1, np.int64))  # [penalised + 1]
    allowed: Ints = field(default_factory=_no_pairs)  # [pairs, 2]: row, token; mask its others
    mask_rows: Ints = field(default_factory=_no_rows)  # [masked]
    mask_bits: NDArray[np.int32] = field(default_factory=lambda: np.empty((0, 0), np.int32))
    top_modes: Ints = field(default_factory=_no_rows)  # [S]; empty: all raw
    target_temperatures: Floats = field(default_factory=_none)  # [P]; empty: 1 for all
    kept_rows: Ints = field(default_factory=_no_rows)  # [rows] that tell what is left to them

    @property
    def num_sampled(self) -> int:
        return len(self.top_k)

    @property
    def num_rows(self) -> int:
        return len(self.num_top)

    @classmethod
    def of(
        cls,
        drawing: list[Sequence],
        coming: Ints,
        targets: Ints,
        scored: list[tuple[int, float]],
    ) -> SamplingMetadata:
        """Of sequences that draw, with ``coming`` [S] tokens more than each knows by then (one that
        has drafts comes once behind each, too), and of rows that score ``targets``, each with how
        many alternatives it reports at which temperature.
        """
        params = [s.params for s in drawing]
        top = [-1 if p.logprobs is None else p.logprobs for p in params]
        top += [count for count, _ in scored]
        asked = max(top, default=0) > 0  # of most steps none does, and each costs the host time
        modes = [p.top_logprobs_mode if p.logprobs else TOP_MODES[0] for p in params if asked]
        tempered = any(temperature != 1 for _, temperature in scored)
        edited = [(i, s) for i, s in enumerate(drawing) if s.token_edits or s.bad_words]
        penalised = [(i, s) for i, s in enumerate(drawing) if s.penalised]
        masked = [(i, s.mask) for i, s in enumerate(drawing) if s.mask is not None]
        return cls(
            numbers=np.array([_numbers(p) for p in params], np.float32).reshape(-1, 6),
            top_k=np.array([p.top_k for p in params], np.int64),
            seeds=np.array([s.seed & _MASK for s in drawing], np.uint64).view(np.int64),
            counters=np.array([len(s.token_ids) for s in drawing], np.int64) + coming,
            targets=targets,
            num_top=np.array(top, np.int64),
            top_modes=_unless(np.array([*map(TOP_MODES.index, modes)], np.int64), 0),
            **_edits(edited, coming) if edited else {},
            **_seen(penalised) if penalised else {},
            mask_rows=np.array([row for row, _ in masked], np.int64),
            mask_bits=np.stack([m for _, m in masked]) if masked else np.empty((0, 0), np.int32),
            target_temperatures=np.array([t for _, t in scored if tempered], np.float32),
            kept_rows=np.array([i for i, s in enumerate(drawing) if s.kept is not None], np.int64),
        )

    @property
    def most_top(self) -> int:
        return max(0, int(self.num_top.max(initial=0)))

    @property
    def scan_temperatures(self) -> Floats | None:
        """[S + P]: at which each row's raw logprobs are; None where it is 1 for all."""
        if not len(self.target_temperatures):
            return None
        return np.concatenate([np.ones(self.num_sampled, np.float32), self.target_temperatures])

    @property
    def processed_rows(self) -> tuple[Ints, ...]:
        """The rows that each of the logits processors changes."""
        return self.mask_rows, self.allowed[:, 0], self.edit_rows, self.seen_rows

    def tensors(self) -> dict[str, Tensor]:
        """The arrays as tensors that share their memory; what is empty stays out."""
        arrays = ((name, getattr(self, name)) for name in _EMPTY)
        return {name: torch.from_numpy(array) for name, array in arrays if array.size}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> SamplingMetadata:
        return cls(
            **{
                name: tensors[name].numpy() if name in tensors else empty
                for name, empty in _EMPTY.items()
            }
        )

    def rows(self, start: int, stop: int) -> SamplingMetadata:
        """The settings of rows ``start <= row < stop`` alone, renumbered from 0."""
        if start == 0 and stop >= self.num_rows:
            return self
        count = self.num_sampled
        drawn = slice(min(start, count), min(stop, count))
        scored = slice(max(start - count, 0), max(stop - count, 0))
        edits = slice(*np.searchsorted(self.edit_rows, (start, stop)))
        allowed = slice(*np.searchsorted(self.allowed[:, 0], (start, stop)))
        masked = slice(*np.searchsorted(self.mask_rows, (start, stop)))
        kept = slice(*np.searchsorted(self.kept_rows, (start, stop)))
        first, last = np.searchsorted(self.seen_rows, (start, stop))
        starts = self.seen_starts[first : last + 1]
        return SamplingMetadata(
            numbers=self.numbers[drawn],
            top_k=self.top_k[drawn],
            seeds=self.seeds[drawn],
            counters=self.counters[drawn],
            targets=self.targets[scored],
            num_top=self.num_top[start:stop],
            top_modes=_unless(self.top_modes[drawn], 0),
            edit_rows=self.edit_rows[edits] - start,
            edit_ids=self.edit_ids[edits],
            edit_values=self.edit_values[edits],
            seen_ids=self.seen_ids[starts[0] : starts[-1]],
            seen_counts=self.seen_counts[starts[0] : starts[-1]],
            seen_rows=self.seen_rows[first:last] - start,
            seen_starts=starts - starts[0],
            allowed=self.allowed[allowed] - (start, 0),
            mask_rows=self.mask_rows[masked] - start,
            mask_bits=self.mask_bits[masked],
            target_temperatures=_unless(self.target_temperatures[scored], 1),
            kept_rows=self.kept_rows[kept] - start,
        )

    def picked(self, rows: Ints) -> SamplingMetadata:
        """What rows that draw, and whose tokens before change nothing, draw by; nothing else that
        they ask for.
        """
        edits, edit_rows = _of_rows(self.edit_rows, rows)
        allowed, allowed_rows = _of_rows(self.allowed[:, 0], rows)
        return SamplingMetadata(
            numbers=self.numbers[rows],
            top_k=self.top_k[rows],
            seeds=self.seeds[rows],
            counters=self.counters[rows],
            targets=_no_rows(),
            num_top=np.full(len(rows), -1),
            edit_rows=edit_rows,
            edit_ids=self.edit_ids[edits],
            edit_values=self.edit_values[edits],
            allowed=np.stack([allowed_rows, self.allowed[allowed, 1]], 1),
        )


def _unless(column: _Column, all_are: int) -> _Column:
    """Nothing, where every row has what it has without saying."""
    return column if (column != all_are).any() else column[:0]


def _of_rows(owners: Ints, rows: Ints) -> tuple[Ints, Ints]:
    """Which of ``owners``, which ascend, are one of ``rows``, row by row; and the number of each
    one's row among them.
    """
    starts, stops = np.searchsorted(owners, rows), np.searchsorted(owners, rows, "right")
    counts = stops - starts
    among = np.repeat(np.arange(len(rows)), counts)
    return np.arange(counts.sum()) + (stops - counts.cumsum())[among], among


def _empty(name: str) -> NDArray[Any]:
    floats = ("numbers", "edit_values", "seen_counts", "target_temperatures")
    shape = {"numbers": (0, 6), "allowed": (0, 2), "mask_bits": (0, 0)}.get(name, (0,))
    dtype = np.float32 if name in floats else np.int32 if name == "mask_bits" else np.int64
    return np.empty(shape, dtype)


#: what a field of ``SamplingMetadata`` is where it holds nothing
_EMPTY = {f.name: _empty(f.name) for f in fields(SamplingMetadata)}


def process_logits(values: Tensor, sampling: SamplingMetadata) -> None:
    """Every logits processor, in order, in place on [S, vocabulary] float32."""
    if len(sampling.mask_rows):
        _mask_by_grammar(values, sampling)
    if len(sampling.allowed):
        _mask_others(values, sampling)
    if len(sampling.edit_rows):
        _add_edits(values, sampling)
    if len(sampling.seen_rows):
        _penalise(values, sampling)


def _mask_by_grammar(values: Tensor, sampling: SamplingMetadata) -> None:
    """Minus infinity where a row's bit is not set."""
    bits = to_device(torch.from_numpy(sampling.mask_bits), values.device)
    shifts = torch.arange(32, dtype=torch.int32, device=values.device)
    kept = ((bits[:, :, None] >> shifts) & 1).bool().flatten(1)[:, : values.shape[1]]
    rows = to_device(torch.from_numpy(sampling.mask_rows), values.device)
    values[rows] = values[rows].masked_fill(~kept, float("-inf"))


def _mask_others(values: Tensor, sampling: SamplingMetadata) -> None:
    """Minus infinity for every token of a row in ``allowed`` but those that are there."""
    device = values.device
    rows, ids = to_device(torch.from_numpy(sampling.allowed), device).unbind(1)
    of_rows = np.bincount(sampling.allowed[:, 0])  # no sort: there may be millions
    limited = to_device(torch.from_numpy(np.flatnonzero(of_rows)), device)
    kept = values[rows, ids]
    values[limited] = float("-inf")
    values[rows, ids] = kept


def _add_edits(values: Tensor, sampling: SamplingMetadata) -> None:
    """Add ``edit_values`` to their logits, in place on [S, vocabulary] float32.

    Tokens outside the vocabulary (a tokenizer's unused stop ids) are passed over.
    """
    vocab, device = values.shape[1], values.device
    inside = (sampling.edit_ids >= 0) & (sampling.edit_ids < vocab)
    index = to_device(
        torch.from_numpy((sampling.edit_rows * vocab + sampling.edit_ids)[inside]), device
    )
    values.view(-1).index_add_(
        0, index, to_device(torch.from_numpy(sampling.edit_values[inside]), device)
    )


def _penalise(values: Tensor, sampling: SamplingMetadata) -> None:
    """Penalise tokens already in the sequence, in place on [S, vocabulary] float32.

    Repetition, over prompt and output: a positive logit is divided by it, another multiplied
    (Keskar 2019). Then, over the output only: minus frequency times the count, minus presence.
    """
    rows, counts, ids = (
        to_device(torch.from_numpy(array), values.device)
        for array in (
            np.repeat(sampling.seen_rows, np.diff(sampling.seen_starts)),
            sampling.seen_counts,
            sampling.seen_ids,
        )
    )
    numbers = to_device(torch.from_numpy(sampling.numbers), values.device)[rows]
    score, repetition = values[rows, ids], numbers[:, REPETITION]
    score = torch.where(score < 0, score * repetition, score / repetition)
    minus = numbers[:, FREQUENCY] * counts + numbers[:, PRESENCE] * (counts > 0)
    values[rows, ids] = score - minus


def _may_end(word: tuple[int, ...], sequence: Sequence) -> bool:
    """Whether all but the last token of ``word`` are the newest of the output; copies no more."""
    before, tokens = len(word) - 1, sequence.token_ids
    if not before:
        return True
    if before > sequence.output_len or tokens[-1] != word[-2]:
        return False
    return tuple(tokens[-before:]) == word[:-1]


def _seen(penalised: list[tuple[int, Sequence]]) -> dict[str, Any]:
    """What the fields of that name are, of rows and their sequences."""
    rows, found = [row for row, _ in penalised], [s.seen_tokens() for _, s in penalised]
    return {
        "seen_ids": np.concatenate([ids for ids, _ in found]),
        "seen_counts": np.concatenate([counts for _, counts in found]),
        "seen_rows": np.array(rows, np.int64),
        "seen_starts": np.cumsum([0, *(len(ids) for ids, _ in found)], dtype=np.int64),
    }


def _edits(edited: list[tuple[int, Sequence]], coming: Ints) -> dict[str, Any]:
    """The edits of rows and their sequences (stops that come too early, the ends of bad words,
    and logit_bias), and the tokens that are allowed alone.
    """
    never = np.float32(-np.inf)
    found: list[tuple[int, Ints, Floats]] = []
    allowed: list[tuple[int, Ints]] = []
    for row, sequence in edited:
        if sequence.bad_words:
            ends = [word[-1] for word in sequence.bad_words if _may_end(word, sequence)]
            found.append((row, np.array(ends, np.int64), np.full(len(ends), never)))
        if (asked := sequence.token_edits) is None:
            continue
        if sequence.params.min_tokens > sequence.output_len + coming[row]:
            found.append((row, asked.stops, np.full(len(asked.stops), never)))
        found.append((row, asked.bias_ids, asked.bias))
        allowed.append((row, asked.allowed))
    rows, ids = _joined([(row, tokens) for row, tokens, _ in found])
    values = np.concatenate([_none(), *(added for *_, added in found)])
    fields = {"edit_rows": rows, "edit_ids": ids, "edit_values": values}
    return {**fields, "allowed": np.stack(_joined(allowed), 1)}


def _joined(owned: list[tuple[int, Ints]]) -> tuple[Ints, Ints]:
    """Tokens of rows, one behind the other: whose they are, and they."""
    owners = [row for row, _ in owned]
    rows = np.repeat(np.array(owners, np.int64), [len(tokens) for _, tokens in owned])
    return rows, np.concatenate([_no_rows(), *(tokens for _, tokens in owned)])
