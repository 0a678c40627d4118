"""Native ``rotary_store``: the two native ops, one after the other."""

from torch import Tensor

from rollout.kernels.native import library
from rollout.kernels.rotary.cpu import rotary
from rollout.kernels.store_kv.cpu import store_kv


def available() -> bool:
    return library() is not None


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
    q, k = rotary(q, k, cos, sin)
    store_kv(k, v, k_cache, v_cache, slots)
    return q
