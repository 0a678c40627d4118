"""Native ``paged_attention`` over float32, bfloat16 and codes (see ``native/attention.c``)."""

import ctypes

import torch
from torch import Tensor

from rollout.kernels.kv_codes import are_pages, kind_of
from rollout.kernels.native import BF16, entry
from rollout.kernels.native.prototypes import structure
from rollout.kernels.paged_attention import paged_attention as op

MAX_DIM, MAX_GROUP = 256, 64  # head dimension, query heads of a KV head: MAX_DIM, ROWS there


def takes_heads(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the native code is made for heads of that size and number."""
    return dim <= MAX_DIM and heads <= MAX_GROUP * kv_heads


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
    _, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    assert k_cache.shape == v_cache.shape
    assert dim == k_cache.shape[3]
    assert heads % kv_heads == 0, f"{kv_heads} KV heads do not divide {heads} query heads"
    assert len(query_starts) == len(context_lens) + 1
    bf16 = BF16.get(q.dtype)
    alike = are_pages(q.dtype, k_cache, k_scales) and are_pages(q.dtype, v_cache, v_scales)
    fits = takes_heads(heads, kv_heads, dim) and scale > 0
    if bf16 is None or not (alike and fits and k_cache.dtype == v_cache.dtype):
        places, scales = (query_starts, context_lens, block_tables), (k_scales, v_scales)
        return op.reference(q, k_cache, v_cache, *places, scale, window, softcap, sinks, *scales)
    if q.stride(2) != 1:
        q = q.contiguous()
    starts, lengths, tables = (
        x.to(torch.int32).contiguous() for x in (query_starts, context_lens, block_tables)
    )
    if sinks is not None:
        assert sinks.shape == (heads,)
        sinks = sinks.to(torch.float32).contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    problem = structure("Problem")(
        *(q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr()),
        *(starts.data_ptr(), lengths.data_ptr(), tables.data_ptr()),
        *(None if x is None else x.data_ptr() for x in (sinks, k_scales, v_scales)),
        *(q.stride(0), q.stride(1), kv_heads * block * dim, block * dim),
        *(len(lengths), heads, kv_heads, dim, block, tables.shape[1], window),
        kind_of(k_cache),
        *(scale, softcap),
    )
    run = entry("paged_attention")
    if run(ctypes.addressof(problem), bf16, torch.get_num_threads()):
        raise MemoryError("paged_attention: no memory for its scratch")
    return out


batch_invariant_attention = paged_attention  # it keeps one order
