"""Attention within chunks, as attention of shorter sequences over the same pages."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollout.models.forward import ForwardBatch


def within_chunks(batch: ForwardBatch, chunk: int, block: int) -> ForwardBatch:
    """``batch`` whose sequences are the parts that lie in one chunk: positions since a multiple
    of ``chunk``, which blocks of ``block`` positions divide.

    Rows, positions and slots are as they were: a part's context are the pages of its chunk up to
    its last row. Nothing is read back from the device where each sequence has one row.
    """
    assert chunk % block == 0, f"blocks of {block} in chunks of {chunk}"
    if len(batch.input_ids) == len(batch.context_lens):
        last = (batch.context_lens - 1).clamp(min=0)
        first = torch.div(last, chunk, rounding_mode="floor") * chunk
        tables = _pages(batch.block_tables, first // block, chunk // block)
        return replace(batch, context_lens=batch.context_lens - first, block_tables=tables)
    starts, lengths = batch.query_starts.tolist(), batch.context_lens.tolist()
    rows, owners, firsts, contexts = [0], [], [], []
    for s, length in enumerate(lengths):
        at = length - (starts[s + 1] - starts[s])
        while at < length:
            first = at // chunk * chunk
            stop = min(first + chunk, length)
            rows.append(rows[-1] + stop - at)
            owners.append(s)
            firsts.append(first // block)
            contexts.append(stop - first)
            at = stop
    device = batch.block_tables.device
    found = [torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, contexts, firsts)]
    tables = batch.block_tables[torch.tensor(owners, dtype=torch.int64, device=device)]
    tables = _pages(tables, found[2], chunk // block)
    return replace(batch, query_starts=found[0], context_lens=found[1], block_tables=tables)


def _pages(tables: Tensor, first: Tensor, count: int) -> Tensor:
    """Of each row of ``tables`` up to ``count`` entries from its ``first`` on."""
    width = tables.shape[1]
    steps = torch.arange(min(count, width), device=tables.device)
    return tables.gather(1, (first[:, None] + steps).clamp(max=width - 1).long())
