"""Triton ``ordered_attention``: one size of tile for prefill and decode, keys never split."""

from torch import Tensor

from rollout.kernels.ordered_attention import ordered_attention as op
from rollout.kernels.paged_attention.gpu import attend, fixed_tiles, takes


def ordered_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    arguments = (q, k_cache, v_cache, query_starts, context_lens, block_tables)
    if not takes(q, k_cache, v_cache):
        return op.reference(*arguments, scale)
    tiles = fixed_tiles(q.shape[1] // k_cache.shape[1], q.shape[2], q.dtype)
    return attend(*arguments, scale, tiles)
