"""Paged attention whose rows have the same bits in any batch."""

from torch import Tensor

from rollout.kernels.op import op
from rollout.kernels.paged_attention import paged_attention


@op
def ordered_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    scale: float,
) -> Tensor:
    """``paged_attention``, where a row's bits depend on its own sequence alone.

    Neither the other sequences of the batch matter, nor how this one is cut into steps. The native
    ``paged_attention`` is so already; this reference, in torch's own order, is not.
    """
    return paged_attention.reference(
        q, k_cache, v_cache, query_starts, context_lens, block_tables, scale
    )
