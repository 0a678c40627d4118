"""Root-mean-square normalisation."""

import torch
from torch import Tensor

from rollout.kernels.op import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))`` over the last dimension.

    x: [..., D]; weight: [D] of the same dtype. The norm is taken in float32 and rounded to
    ``x.dtype`` before ``weight`` multiplies it, which is the order of transformers.
    """
    assert weight.shape == x.shape[-1:], f"weight {weight.shape} does not fit x {x.shape}"
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)
