"""Triton ``norm_rope_and_cache``: ``rope_and_cache`` with the norm of a head as it is read."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS
from rollout.kernels.norm_rope_and_cache import norm_rope_and_cache as op
from rollout.kernels.rope_and_cache import is_for_kernel
from rollout.kernels.rope_and_cache.gpu import HeadNorm, turn


def norm_rope_and_cache(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    offset: float | None,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> Tensor:
    weights = (q_weight, k_weight)
    alike = all(one.dtype == q.dtype and one.is_contiguous() for one in weights)
    rest = (cos, sin, k_cache, v_cache, slots, k_scales, v_scales)
    if not alike or not is_for_kernel(FLOATS, q, k, v, *rest):
        return op.reference(q, k, v, q_weight, k_weight, eps, offset, *rest)
    assert all(one.shape == q.shape[2:] for one in weights), "a weight for each element of a head"
    norm = HeadNorm(q_weight, k_weight, eps, offset)
    return turn(q, k, v, *rest, norm)
