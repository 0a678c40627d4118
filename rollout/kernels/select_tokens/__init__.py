"""Which tokens of its context a query attends to, where an index of keys chooses them."""

import torch
from torch import Tensor

from rollout.kernels.op import op

STEP_SCORES = 1 << 24  # elements of the largest tensor that is made at once


@op
def select_tokens(
    q: Tensor,
    weights: Tensor,
    k_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    count: int,
) -> tuple[Tensor, Tensor]:
    """The ``count`` tokens of each row's context that its index scores highest.

    The score of token t is ``sum_h weights[h] * relu(q[h] . k[t])``, in float32 (float64 for
    float64 inputs). q: [T, H, D]; weights: float32 [T, H]; k_cache: [blocks, 1, block, D];
    query_starts, context_lens, block_tables: as of ``paged_attention``, all keys in the cache.
    Returns their slots, ``page * block + offset``, in the order of positions: int32
    [T, W] with W = min(count, all that the tables have room for), zeros behind; and how many there
    are, int32 [T], at least 1: all tokens up to the row's own, where those are no more than W. Of
    equal scores earlier tokens come first. (DeepSeek-V3.2, arXiv 2512.02556, section 2.1, in the
    model's dtype, without the rotation that precedes 8-bit keys there.)
    """
    (tokens, heads, dim), (_, kv_heads, block, _) = q.shape, k_cache.shape
    assert kv_heads == 1
    assert k_cache.shape[3] == dim
    assert weights.shape == (tokens, heads)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    width = min(count, block_tables.shape[1] * block)
    slots = torch.zeros(tokens, width, dtype=torch.int32, device=q.device)
    counts = torch.ones(tokens, dtype=torch.int32, device=q.device)
    starts, offsets = query_starts.tolist(), torch.arange(block, device=q.device)
    for s, length in enumerate(context_lens.tolist()):
        if starts[s] == starts[s + 1]:
            continue
        pages = block_tables[s, : -(-length // block)].long()
        keys = k_cache[pages, 0].flatten(0, 1)[:length].to(wide)
        places = (pages[:, None] * block + offsets).flatten()[:length]
        step = max(1, STEP_SCORES // (heads * length))
        for row in range(starts[s], starts[s + 1], step):
            rows = slice(row, min(row + step, starts[s + 1]))
            scores = (q[rows].to(wide) @ keys.T).relu_()  # [rows, H, length]
            scores = (weights[rows, None].to(wide) @ scores)[:, 0]
            seen = torch.arange(rows.start, rows.stop, device=q.device) + 1
            seen += length - starts[s + 1]
            found, counts[rows] = highest(scores, seen, places.expand_as(scores), width)
            slots[rows, : found.shape[1]] = found
    return slots, counts


def highest(scores: Tensor, seen: Tensor, places: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The places of the ``width`` highest of the first ``seen`` [T] scores [T, N] of each row.

    Nothing is read back from the device, and no shape depends on values. Memory: some [T, N].
    """
    rows, number = scores.shape
    hidden = torch.arange(number, device=scores.device) >= seen[:, None]
    taken = ~hidden
    if number > width:
        scores = scores.masked_fill(hidden, float("-inf"))
        least = scores.topk(width, dim=-1).values.amin(-1, keepdim=True)
        above, equal = scores > least, scores == least
        room = width - above.sum(-1, keepdim=True)
        taken &= above | (equal & (equal.cumsum(-1) <= room))
    at = torch.where(taken, taken.cumsum(-1) - 1, width)
    found = torch.zeros(rows, width + 1, dtype=torch.int32, device=scores.device)
    found.scatter_(1, at, places.to(torch.int32))
    return found[:, :width], taken.sum(-1).clamp(min=1).to(torch.int32)
