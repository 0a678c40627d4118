"""Causal attention of the newest tokens of several sequences over their paged KV cache."""

import torch
from torch import Tensor

from rollout.kernels.op import op

WIDE = 512  # elements of a head, of which all heads of a group are attended to at once on a GPU
_QUERY_ROWS = 256  # bounds the score matrix of a long prefill


@op
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """``softmax(scale * q k^T + causal mask) v`` per sequence and head; returns [T, H, D].

    q: [T, H, D]; k_cache, v_cache: [blocks, KH, block, D], KH dividing H: query head h reads
    KV head h // (H / KH). Sequence s owns rows query_starts[s]:query_starts[s+1] (int32 [S+1]):
    the last tokens of its context of context_lens[s] tokens (int32 [S]), all of them already in
    the cache, position p in block block_tables[s, p // block] (int32 [S, M]). A sequence
    without rows is skipped. Prefill, chunked prefill and decode are this one case.
    ``window``: how many keys a query sees, its own included; 0 for all. Where a block lies before
    the windows of all rows of a sequence, its number may be stale. ``softcap``: scaled scores
    become ``softcap * tanh(score / softcap)``; 0 for no cap. ``sinks``: float32 [H], a score of
    each head that takes part in its softmax and has no value. ``k_scales``, ``v_scales``: float32
    [blocks, KH, block], where the pages hold codes (``kv_codes``): a key is its codes times its
    scale.
    Sums and softmax are float32 (float64 for float64 inputs).
    """
    kv_heads, block = k_cache.shape[1], k_cache.shape[2]
    assert k_cache.shape == v_cache.shape
    assert q.shape[1] % kv_heads == 0
    assert q.shape[2] == k_cache.shape[3]
    assert len(query_starts) == len(context_lens) + 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    starts, lengths = query_starts.tolist(), context_lens.tolist()
    for s, length in enumerate(lengths):
        if starts[s] == starts[s + 1]:
            continue
        pages = block_tables[s, : -(-length // block)].long()
        k, v = (
            _read(cache, scales, pages, length)
            for cache, scales in ((k_cache, k_scales), (v_cache, v_scales))
        )  # [KH, length, D]
        for row in range(starts[s], starts[s + 1], _QUERY_ROWS):
            rows = slice(row, min(row + _QUERY_ROWS, starts[s + 1]))
            first = length - (starts[s + 1] - row)
            out[rows] = _attend(q[rows], k, v, first, scale, window, softcap, sinks)
    return out


@op
def batch_invariant_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    """``paged_attention``, where a row's bits depend on its own sequence alone.

    Neither the other sequences of the batch matter, nor how this one is cut into steps. The native
    ``paged_attention`` is so already; this reference, in torch's own order, is not.
    """
    return paged_attention.reference(
        q,
        k_cache,
        v_cache,
        query_starts,
        context_lens,
        block_tables,
        scale,
        window,
        softcap,
        sinks,
        k_scales,
        v_scales,
    )


def has_few_queries(tokens: int, sequences: int) -> bool:
    """Whether so many rows of so many sequences are attended to as decodes are: each by itself, its
    keys split. Shapes alone decide, so that a captured graph stays valid for all that it is
    filled with.
    """
    return tokens <= 2 * sequences


def has_gpu_kernel(kv_heads: int, dim: int, dtype: torch.dtype) -> bool:
    """Whether a GPU has a kernel for heads of so many elements. The reference, which runs where it
    has none, reads numbers of the batch on the host, and so fits into no graph.
    """
    return dim <= (2 * WIDE if kv_heads == 1 and dtype.itemsize == 2 else WIDE)


def _read(cache: Tensor, scales: Tensor | None, pages: Tensor, length: int) -> Tensor:
    found = cache[pages].transpose(0, 1).flatten(1, 2)[:, :length]
    if scales is None:
        return found
    return found.to(scales.dtype) * _read(scales, None, pages, length)[..., None]


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: int,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """Rows of one sequence at positions ``first``, ``first + 1`` ... over keys [KH, length, D]."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows, heads, dim = q.shape
    stop = first + rows
    start = max(0, first + 1 - window) if window else 0
    k, v = k[:, start:stop].to(wide), v[:, start:stop].to(wide)
    grouped = q.to(wide).view(rows, k.shape[0], -1, dim).permute(1, 2, 0, 3)  # [KH, G, rows, D]
    scores = grouped @ k.transpose(1, 2)[:, None] * scale
    if softcap:
        scores = (scores / softcap).tanh() * softcap
    keys = torch.arange(start, stop, device=q.device)
    positions = torch.arange(first, stop, device=q.device)[:, None]
    hidden = keys > positions
    if window:
        hidden |= keys <= positions - window
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        sunk = sinks.to(wide).view(k.shape[0], -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, sunk), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)]
    return (weights @ v[:, None]).permute(2, 0, 1, 3).reshape(rows, heads, dim).to(q.dtype)
