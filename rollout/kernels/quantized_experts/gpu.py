"""Triton ``quantized_experts``: the grouped products of ``fused_experts``, of codes."""

from __future__ import annotations

from torch import Tensor

from rollout.kernels.fused_experts import ExpertsLora
from rollout.kernels.fused_experts.gpu import grouped, in_order
from rollout.kernels.gpu_launch import FLOATS
from rollout.kernels.quantized_experts import quantized_experts as op
from rollout.weights.quantization import Scheme


def quantized_experts(
    x: Tensor,
    w13: Tensor,
    s13: Tensor,
    w2: Tensor,
    s2: Tensor,
    experts: Tensor,
    weights: Tensor,
    scheme: Scheme,
    first: int = 0,
    b13: Tensor | None = None,
    b2: Tensor | None = None,
    clamped: tuple[float, float] | None = None,
    squared: bool = False,
    lora: ExpertsLora | None = None,
) -> Tensor:
    if x.dtype not in FLOATS or not all(scales.is_contiguous() for scales in (s13, s2)):
        tables = w13, s13, w2, s2
        return op.reference(
            x, *tables, experts, weights, scheme, first, b13, b2, clamped, squared, lora
        )
    products = grouped(w13, b13, s13, scheme), grouped(w2, b2, s2, scheme)
    return in_order(x, experts, weights, first, len(w13), products, clamped, squared, lora)
