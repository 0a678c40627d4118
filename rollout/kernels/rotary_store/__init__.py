"""Rotary position embedding of new queries and keys, and their way into the KV cache, in one."""

from torch import Tensor

from rollout.kernels.op import op
from rollout.kernels.rotary import rotary
from rollout.kernels.store_kv import store_kv


@op
def rotary_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """``q, k = rotary(q, k, cos, sin); store_kv(k, v, k_cache, v_cache, slots)``; returns q.

    Shapes as there. The Triton implementation passes over tokens whose slot is negative: the
    padding of a captured graph.
    """
    q, k = rotary.reference(q, k, cos, sin)
    store_kv.reference(k, v, k_cache, v_cache, slots)
    return q
