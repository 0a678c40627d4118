"""Weights in fewer bits as what they stand for; see ``rollout.weights.quantization``."""

import torch
from torch import Tensor

from rollout.kernels.op import op
from rollout.weights.quantization import Scheme


@op
def dequantize(codes: Tensor, scales: Tensor | None, scheme: Scheme, dtype: torch.dtype) -> Tensor:
    """``Scheme.dequantize`` of codes [.., n, k / per_byte], bit for bit; without ``scales`` what
    the codes stand for by themselves.
    """
    if scales is None:
        return scheme.values(codes).to(dtype)
    return scheme.dequantize(codes, scales, dtype)
