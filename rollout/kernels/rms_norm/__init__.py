"""Root-mean-square normalisation."""

import torch
from torch import Tensor

from rollout.kernels.op import op


@op
def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    """``weight * (x / sqrt(mean(x^2) + eps))`` over the last dimension.

    x: [..., D]; weight: [D] of the same dtype. The norm is taken in float32 and rounded to
    ``x.dtype`` before ``weight`` multiplies it, which is the order of Llama in transformers. With
    an ``offset`` ``weight + offset`` multiplies it in float32, and the product alone is rounded:
    the order of Gemma (1.0) and OLMo (0.0).
    """
    assert weight.shape == x.shape[-1:], f"weight {weight.shape} does not fit x {x.shape}"
    wide = x if x.dtype == torch.float64 else x.float()
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if offset is None:
        return weight * (wide * scale).to(x.dtype)
    return (wide * scale * (weight.to(wide.dtype) + offset)).to(x.dtype)
