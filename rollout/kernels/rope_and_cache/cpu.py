"""Native ``rope_and_cache``: keys are rotated straight into their pages."""

import ctypes

import torch
from torch import Tensor

from rollout.kernels.kv_codes import kind_of
from rollout.kernels.native import BF16, entry
from rollout.kernels.native.prototypes import structure
from rollout.kernels.rope_and_cache import is_for_kernel
from rollout.kernels.rope_and_cache import rope_and_cache as op

MAX_CODED = 1024  # elements of a head that becomes codes: MAX_CODED in native/kv_codes.h


def rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    values, v_pages, others = (
        (k, k_cache, k_scales) if v is None or v_cache is None else (v, v_cache, v_scales)
    )
    fits = is_for_kernel(BF16, q, k, values, cos, sin, k_cache, v_pages, slots, k_scales, others)
    if not fits or (k_scales is not None and q.shape[2] > MAX_CODED):
        return op.reference(q, k, v, cos, sin, k_cache, v_cache, slots, k_scales, v_scales)
    tokens, heads, dim = q.shape
    _, kv_heads, block, _ = k_cache.shape
    q, k, values = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, values))
    cos, sin, slots = cos.contiguous(), sin.contiguous(), slots.long().contiguous()
    out = torch.empty(q.shape, dtype=q.dtype)
    turn = structure("Turn")(
        *(q.data_ptr(), k.data_ptr(), None if v is None else values.data_ptr()),
        *(x.data_ptr() for x in (cos, sin, out, k_cache, v_pages)),
        *(None if x is None else x.data_ptr() for x in (k_scales, others)),
        slots.data_ptr(),
        *(q.stride(0), q.stride(1), k.stride(0), k.stride(1), values.stride(0), values.stride(1)),
        *(tokens, heads, kv_heads, dim, cos.shape[1], block, kind_of(k_cache)),
    )
    run = entry("rope_and_cache")
    wide = int(cos.dtype == torch.float32)
    run(ctypes.addressof(turn), BF16[q.dtype], wide, torch.get_num_threads())
    return out
