"""The norm of new queries' and keys' heads, their rotation, and their way into the KV cache."""

from torch import Tensor

from rollout.kernels.op import op
from rollout.kernels.rms_norm import rms_norm
from rollout.kernels.rope_and_cache import rope_and_cache


@op
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
    """``rope_and_cache`` of ``rms_norm`` of each head of q by q_weight, and of k by k_weight.

    q_weight, k_weight: [D] of ``q.dtype``; eps and offset are those of ``rms_norm``, the rest is as
    ``rope_and_cache`` takes it. Returns the rotated q, dense.
    """
    q = rms_norm.reference(q, q_weight, eps, offset)
    k = rms_norm.reference(k, k_weight, eps, offset)
    return rope_and_cache.reference(q, k, v, cos, sin, k_cache, v_cache, slots, k_scales, v_scales)
