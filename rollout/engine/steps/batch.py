"""One step's work as arrays: built from sequences in the core, read back on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rollout.engine.memory import to_device
from rollout.engine.sampling.metadata import Ints, SamplingMetadata
from rollout.engine.sequences.sequence import ScheduledBatch, ScheduledEntry, Sequence
from rollout.engine.steps.draft_batch import DraftBatch
from rollout.kernels.lora_linear import TILE
from rollout.models.forward import ForwardBatch

_NOT_SENT = ("visual", "expert_pages", "hidden_pages", "chosen", "lasting_slots")
_FORWARD = tuple(f.name for f in fields(ForwardBatch) if f.name not in _NOT_SENT)


def encode_batch(
    batch: ScheduledBatch, block_size: int
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments and tensors of ``step``; a pure function of the sequences.

    A batch with ``previous_rows`` is encoded while the step before it runs, by what its sequences
    will be when that step is booked; the ranks put the tokens in. Rows of logits: first one per
    entry that samples, and one behind each of its drafts, then the prompt positions that are
    scored, then those that bring hidden states alone, all in the order of the entries.
    ``hidden_sums``, where there are any: to which sum each of these is added. ``expert_slots``: the
    places in the KV cache whose experts are wanted, of what the step computes and of what was found
    there.
    """
    entries = batch.entries
    count = len(entries)
    sequences = [entry.sequence for entry in entries]
    new = np.fromiter((entry.num_new for entry in entries), np.int64, count)
    coming = 0 if batch.previous_rows is None else 1  # tokens that each will have by then
    known = np.fromiter((len(s.token_ids) + coming for s in sequences), np.int64, count)
    starts = known - 1
    if not coming:
        starts = np.fromiter((s.num_computed for s in sequences), np.int64, count)
    query_starts = np.concatenate([[0], new.cumsum()])
    owner = np.repeat(np.arange(count), new)
    positions = np.arange(query_starts[-1]) + (starts - query_starts[:-1])[owner]
    tables = _block_tables(sequences)
    pages = pages_at(tables, owner, positions // block_size)
    draws = np.fromiter((s.draws for s in sequences), np.bool_, count)
    drafted = np.fromiter((len(entry.drafts) for entry in entries), np.int64, count)
    samples = draws & (starts + new - drafted == known)
    drawn = drafted[samples] + 1  # rows of each entry that draws
    behind = np.arange(drawn.sum()) - np.repeat(drawn.cumsum() - drawn, drawn)  # so many drafts
    scored, targets, scored_settings = _prompt_rows(entries, query_starts)
    hidden, sums = _hidden_rows(entries, query_starts)
    arrays = {
        "input_ids": np.full(count, -1) if coming else _input_ids(entries, int(query_starts[-1])),
        "positions": _turning(entries, positions, query_starts),
        "slot_mapping": pages * block_size + positions % block_size,
        "query_starts": query_starts.astype(np.int32),
        "context_lens": (starts + new).astype(np.int32),
        "block_tables": tables,
        "logit_rows": np.concatenate(
            [np.repeat(query_starts[1:][samples] - drawn, drawn) + behind, scored, hidden]
        ),
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if batch.previous_rows is not None:
        tensors["previous_rows"] = torch.tensor(batch.previous_rows)
    drawing = [sequences[i] for i in np.repeat(np.flatnonzero(samples), drawn)]
    if len(sums):
        tensors["hidden_sums"] = torch.from_numpy(sums)
    tensors |= _adapter_tensors(sequences, query_starts)
    lasting = tables if tables.ndim == 2 else tables[-1]
    tensors |= _expert_tensors(batch, positions, lasting, block_size)
    if sequences and sequences[0].state_slot >= 0:
        tensors |= _state_tensors(batch)
    if batch.runs_draft:
        rows = np.cumsum(np.where(samples, drafted + 1, 0)) - drafted - 1
        tensors |= DraftBatch.of(entries, query_starts, rows, lasting, block_size).tensors()
    tensors |= SamplingMetadata.of(drawing, behind + coming, targets, scored_settings).tensors()
    return {"version": batch.version, "number": batch.number}, tensors


def _expert_tensors(
    batch: ScheduledBatch, positions: Ints, tables: NDArray[np.int32], block_size: int
) -> dict[str, Tensor]:
    """Of a mixture: whose experts the step brings, and int16 [tokens, layers, experts of a token]
    of those that are told, -1 where the router chooses."""
    tensors: dict[str, Tensor] = {}
    slots: list[Ints] = []
    forced: NDArray[np.int16] | None = None
    row = 0
    for index, entry in enumerate(batch.entries):
        seq, count = entry.sequence, entry.num_new
        if seq.experts is not None:
            wanted = np.array(entry.expert_positions, np.int64)
            if batch.previous_rows is not None:  # the step ahead of it brings what comes before
                wanted = positions[row : row + 1]
            pages = tables[index, wanted // block_size].astype(np.int64)
            slots.append(pages * block_size + wanted % block_size)
        told = seq.forced_experts
        if told is not None and int(positions[row]) < len(told):
            if forced is None:
                forced = np.full((len(positions), *told.shape[1:]), -1, np.int16)
            part = told[int(positions[row]) : int(positions[row]) + count]
            forced[row : row + len(part)] = part
        row += count
    if slots:
        tensors["expert_slots"] = torch.from_numpy(np.concatenate(slots))
    if forced is not None:
        tensors["forced_experts"] = torch.from_numpy(forced)
    return tensors


def _hidden_rows(entries: list[ScheduledEntry], query_starts: Ints) -> tuple[Ints, Ints]:
    """Rows of the step's tokens that bring hidden states, and the sum that each goes into."""
    rows: list[NDArray[Any]] = [np.empty(0, np.int64)]
    sums: list[NDArray[Any]] = [np.empty(0, np.int64)]
    count = 0
    for i, entry in enumerate(entries):
        if not entry.sequence.params.hidden_state:
            continue
        wanted, parts = entry.hidden_positions, entry.num_hidden
        rows.append(np.arange(wanted.start, wanted.stop) - entry.start + query_starts[i])
        one = np.full(len(wanted), count)
        sums.append(np.arange(count, count + parts) if parts == len(wanted) else one)
        count += parts
    return np.concatenate(rows), np.concatenate(sums)


def decode_batch(
    args: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[ForwardBatch, SamplingMetadata]:
    """What ``encode_batch`` described, on the CPU; without the tokens of ``previous_rows``."""
    return (
        ForwardBatch(
            **{name: tensors[name] for name in _FORWARD if name in tensors},
            visual=None,
            hidden_pages=None,
            chosen=None,
        ),
        SamplingMetadata.from_tensors(tensors),
    )


def with_drawn(
    batch: ForwardBatch, tensors: Mapping[str, Tensor], drawn: Tensor | None
) -> ForwardBatch:
    """A batch with ``previous_rows`` with its tokens.

    ``drawn``: int64 [S], what the step before has drawn, on any device; None: it has failed. No
    error of ours then: other ranks may have begun, and only the end of this one frees them.
    """
    if drawn is None:
        raise RuntimeError("the step before is missing, whose tokens this one was to continue")
    rows = tensors["previous_rows"]
    if not torch.equal(rows, torch.arange(len(drawn))):  # else no transfer is needed
        drawn = drawn[to_device(rows, drawn.device)]
    return replace(batch, input_ids=drawn)


def _turning(entries: list[ScheduledEntry], places: Ints, query_starts: Ints) -> Ints:
    """By what each token is turned: its place in the sequence, but for those that show something.

    [tokens] where the three positions of each are one, as in steps that only decode; else [3,
    tokens].
    """
    if not any(entry.sequence.visual_positions for entry in entries):
        return places
    wide = np.tile(places, (3, 1))
    for entry, start, stop in zip(entries, query_starts[:-1], query_starts[1:], strict=True):
        if (placed := entry.sequence.visual_positions) is not None and stop > start:
            first = int(places[start])
            wide[:, start:stop] = placed.of(first, first + int(stop - start))
    return wide[0] if (wide == wide[0]).all() else wide


def _state_tensors(batch: ScheduledBatch) -> dict[str, Tensor]:
    """Of a model with recurrent states: each sequence's slot, and pairs of slots (from, to), to be
    copied before the step and after it."""
    slots: list[int] = []
    restores: list[tuple[int, int]] = []
    saves: list[tuple[int, int]] = []
    for seq in (entry.sequence for entry in batch.entries):
        slots.append(seq.state_slot if seq.trial is None else seq.trial.slot)
        if batch.previous_rows is not None:
            continue  # both are of the step before
        if seq.trial is not None:
            restores.append((seq.state_slot, seq.trial.slot))
        if seq.restoring is not None:
            restores.append((seq.restoring.slot, seq.state_slot))
        if seq.saving is not None:
            saves.append((seq.state_slot, seq.saving.slot))
    return {
        "state_slots": torch.tensor(slots, dtype=torch.int32),
        "state_restores": torch.tensor(restores).view(-1, 2),
        "state_saves": torch.tensor(saves).view(-1, 2),
    }


def _adapter_tensors(sequences: list[Sequence], query_starts: Ints) -> dict[str, Tensor]:
    """Of a step with adapters: the tokens that have one, adapter by adapter, and tiles of them."""
    by_slot: dict[int, list[NDArray[np.int32]]] = {}
    for row, sequence in enumerate(sequences):
        if sequence.adapter is not None:
            tokens = np.arange(query_starts[row], query_starts[row + 1], dtype=np.int32)
            place = sequence.adapter_place
            slot = sequence.adapter.slot if place is None else place
            by_slot.setdefault(slot, []).append(tokens)
    if not by_slot:
        return {}
    tiles: list[tuple[int, int, int]] = []
    begin = 0
    for slot, tokens_of in by_slot.items():
        end = begin + sum(map(len, tokens_of))
        tiles += [(slot, at, min(at + TILE, end)) for at in range(begin, end, TILE)]
        begin = end
    rows = np.concatenate([tokens for tokens_of in by_slot.values() for tokens in tokens_of])
    return {
        "adapter_rows": torch.from_numpy(rows),
        "adapter_tiles": torch.tensor(tiles, dtype=torch.int32),
    }


def _block_tables(sequences: list[Sequence]) -> NDArray[np.int32]:
    """[(groups,) sequences, longest table] int32, padded with 0."""
    lists = tables_of(sequences)
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    tables = np.zeros((len(lists), int(lengths.max(initial=0))), np.int32)
    flat = chain.from_iterable(lists)
    tables[np.arange(tables.shape[1]) < lengths[:, None]] = np.fromiter(
        flat, np.int32, int(lengths.sum())
    )
    if len(lists) > len(sequences):
        return tables.reshape(-1, len(sequences), tables.shape[1])
    return tables


def pages_at(tables: NDArray[np.int32], rows: Ints, columns: Ints) -> Ints:
    """[(groups,) entries]: of those ``rows`` and ``columns`` of the tables."""
    if tables.ndim == 2:
        return tables[rows, columns].astype(np.int64)
    return np.stack([table[rows, columns] for table in tables]).astype(np.int64)


def tables_of(sequences: list[Sequence]) -> list[list[int]]:
    """The block tables of the first group, and then of the others where there are several."""
    tables = [seq.block_table for seq in sequences]
    if sequences and sequences[0].more_tables:
        for group in zip(*(seq.more_tables for seq in sequences), strict=True):
            tables += group
    return tables


def _input_ids(entries: list[ScheduledEntry], total: int) -> Ints:
    ids: list[int] = []
    for entry in entries:
        sequence, start = entry.sequence, entry.sequence.num_computed
        if entry.num_new == 1:
            ids.append(sequence.token_ids[start])
        else:
            ids += sequence.token_ids[start : start + entry.num_new]
            ids += entry.drafts
    return np.fromiter(ids, np.int64, total)


def _prompt_rows(
    entries: list[ScheduledEntry], query_starts: Ints
) -> tuple[Ints, Ints, list[tuple[int, float]]]:
    """Rows of the step's tokens that score a prompt token, those tokens, and of each how many
    alternatives it brings at which temperature.
    """
    rows: list[NDArray[Any]] = [np.empty(0, np.int64)]
    targets: list[int] = []
    settings: list[tuple[int, float]] = []
    for i, entry in enumerate(entries):
        params = entry.sequence.params
        if params.prompt_logprobs is None:
            continue
        wanted = entry.prompt_rows
        rows.append(np.arange(wanted.start, wanted.stop) - entry.start + query_starts[i])
        targets += entry.sequence.scored_tokens(wanted)
        settings += [(params.prompt_logprobs, params.prompt_temperature)] * len(wanted)
    return np.concatenate(rows), np.array(targets, np.int64), settings
