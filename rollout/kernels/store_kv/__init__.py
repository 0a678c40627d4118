"""Writing new keys and values into the pages of the KV cache."""

from torch import Tensor

from rollout.kernels.op import op


@op
def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """``cache[slot // block, :, slot % block] = value`` for each token, in place.

    k, v: [T, KH, D]; k_cache, v_cache: [blocks, KH, block, D] of the same dtype; slots: [T] int64,
    distinct, each below blocks * block.
    """
    assert k.shape == v.shape
    assert k_cache.shape == v_cache.shape
    assert slots.shape == k.shape[:1]
    assert k_cache.shape[1] == k.shape[1]
    assert k_cache.shape[3] == k.shape[2]
    block = k_cache.shape[2]
    pages, offsets = slots // block, slots % block
    k_cache[pages, :, offsets] = k
    v_cache[pages, :, offsets] = v
