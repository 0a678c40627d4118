"""Triton ``select_tokens``: scores of some keys of one row per program; the choice is torch's."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, launch, multiply, power_of_2, sequence_of
from rollout.kernels.select_tokens import STEP_SCORES, highest
from rollout.kernels.select_tokens import select_tokens as op

_KEYS = 64
_MAX_DIM = 256


def select_tokens(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """Made for captured graphs, too: as much is computed whatever the contexts are."""
    (tokens, heads, dim), block = q.shape, k_cache.shape[2]
    alike = q.dtype == k_cache.dtype and q.dtype in FLOATS
    if not (alike and k_cache.is_contiguous() and dim <= _MAX_DIM):
        return op.reference(q, weights, k_cache, query_starts, context_lens, block_tables, count)
    longest, device = block_tables.shape[1] * block, q.device
    width = min(count, longest)
    slots = torch.zeros(tokens, width, dtype=torch.int32, device=device)
    counts = torch.ones(tokens, dtype=torch.int32, device=device)
    if not tokens or not len(context_lens):
        return slots, counts
    q, weights, tables = q.contiguous(), weights.float().contiguous(), block_tables.contiguous()
    rows = torch.arange(tokens, dtype=torch.int32, device=device)
    last = len(context_lens) - 1
    owner = torch.searchsorted(query_starts[1:].contiguous(), rows, right=True).clamp(max=last)
    seen = context_lens[owner] - query_starts[owner + 1] + rows + 1
    offsets = torch.arange(block, dtype=torch.int32, device=device)
    step = max(1, STEP_SCORES // longest)
    for row in range(0, tokens, step):
        some = slice(row, min(row + step, tokens))
        scores = torch.empty(some.stop - row, longest, dtype=torch.float32, device=device)
        launch(
            _score,
            (some.stop - row, triton.cdiv(longest, _KEYS)),
            *(q[some], weights[some], k_cache, scores, query_starts, context_lens, tables),
            *(row, len(context_lens), longest, tables.stride(0), block),
            HEADS=heads,
            ROWS=max(16, power_of_2(heads)),
            DIM=dim,
            BLOCK_D=max(16, power_of_2(dim)),
            KEYS=_KEYS,
            IEEE=q.dtype == torch.float32,
        )
        places = (tables[owner[some]][..., None] * block + offsets).flatten(1)
        slots[some], counts[some] = highest(scores, seen[some], places, width)
    return slots, counts


@triton.jit(do_not_specialize=["first", "sequences", "table_row"])
def _score(
    q,
    weights,
    k_cache,
    scores,
    query_starts,
    context_lens,
    block_tables,
    first,
    sequences,
    longest,
    table_row,
    block,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    KEYS: tl.constexpr,
    IEEE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    sequence = sequence_of(tl.program_id(0) + first, query_starts, sequences, 1)
    context = tl.load(context_lens + sequence)
    begin = tl.program_id(1) * KEYS
    if begin < context:  # what lies behind is hidden, and never read
        head, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        key = begin + tl.arange(0, KEYS)
        real, inside = key < context, column < DIM
        at = (row * HEADS + head)[:, None] * DIM + column[None, :]
        own = tl.load(q + at, mask=(head < HEADS)[:, None] & inside[None, :], other=0.0)
        table = block_tables + sequence.to(tl.int64) * table_row
        page = tl.load(table + key // block, mask=real, other=0).to(tl.int64)
        there = ((page * block + key % block) * DIM)[:, None] + column[None, :]
        keys = tl.load(k_cache + there, mask=real[:, None] & inside[None, :], other=0.0)
        products = multiply(own, tl.trans(keys), tl.zeros([ROWS, KEYS], tl.float32), IEEE)
        factor = tl.load(weights + row * HEADS + head, mask=head < HEADS, other=0.0)
        total = tl.sum(tl.maximum(products, 0.0) * factor[:, None], 0)
        tl.store(scores + row * longest + key, total, mask=real)
