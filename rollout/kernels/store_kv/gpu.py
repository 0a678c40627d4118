"""Triton ``store_kv``: copies of whole heads; tokens with a negative slot are passed over."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, launch, power_of_2
from rollout.kernels.store_kv import store_kv as op


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    alike = k.dtype == v.dtype == k_cache.dtype == v_cache.dtype and k.dtype in FLOATS
    if not (alike and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return op.reference(k, v, k_cache, v_cache, slots)
    tokens, heads, dim = k.shape
    assert k.shape == v.shape
    assert k_cache.shape == v_cache.shape
    assert slots.shape == (tokens,)
    assert k_cache.shape[1] == heads
    assert k_cache.shape[3] == dim
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    launch(
        _store,
        (tokens, heads),
        *(k, v, k_cache, v_cache, slots, k_cache.shape[2]),
        *(k.stride(0), k.stride(1), v.stride(0), v.stride(1)),
        DIM=dim,
        BLOCK=power_of_2(dim),
        warps=1,
    )
    return None


@triton.jit
def _store(
    k,
    v,
    k_cache,
    v_cache,
    slots,
    page,
    k_token,
    k_head,
    v_token,
    v_head,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    slot = tl.load(slots + token)
    live = column < tl.where(slot >= 0, DIM, 0)
    start = ((slot // page * tl.num_programs(1) + head) * page + slot % page) * DIM
    key = tl.load(k + token * k_token + head * k_head + column, mask=live)
    value = tl.load(v + token * v_token + head * v_head + column, mask=live)
    tl.store(k_cache + start + column, key, mask=live)
    tl.store(v_cache + start + column, value, mask=live)
