"""Native ``store_kv``: copies of whole heads, any dtype."""

from torch import Tensor

from rollout.kernels.native import entry, library
from rollout.kernels.store_kv import store_kv as op


def available() -> bool:
    return library() is not None


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    alike = k.dtype == v.dtype == k_cache.dtype == v_cache.dtype
    if not (alike and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return op.reference(k, v, k_cache, v_cache, slots)
    tokens, heads, dim = k.shape
    assert k.shape == v.shape
    assert k_cache.shape == v_cache.shape
    assert slots.shape == (tokens,)
    assert k_cache.shape[1] == heads
    assert k_cache.shape[3] == dim
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    slots = slots.long().contiguous()
    size = k.element_size()
    entry("store_kv", "pllpllppp" + "llll")(
        k.data_ptr(),
        k.stride(0) * size,
        k.stride(1) * size,
        v.data_ptr(),
        v.stride(0) * size,
        v.stride(1) * size,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        slots.data_ptr(),
        tokens,
        heads,
        k_cache.shape[2],
        dim * size,
    )
    return None
