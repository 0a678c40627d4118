"""Native ``quantized_experts`` of int8: all experts, both products and their sum in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.fused_experts import ExpertsLora
from rollout.kernels.native import entry
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
    """Of bfloat16, where gate and up are plain halves without biases and adapters; others as the
    reference."""
    tables = (w13, s13, w2, s2)
    known = (
        scheme.codes == "int8"
        and x.dtype == torch.bfloat16
        and weights.dtype in (torch.bfloat16, torch.float32)
        and b13 is None
        and b2 is None
        and clamped is None
        and not squared
        and lora is None
        and x.numel()
        and len(w13)
        and all(tensor.is_contiguous() for tensor in tables)
    )
    if not known:
        return op.reference(
            x, *tables, experts, weights, scheme, first, b13, b2, clamped, squared, lora
        )
    if x.stride(1) != 1:
        x = x.contiguous()
    experts, weights = experts.contiguous(), weights.contiguous()
    tokens, chosen = experts.shape
    count, hidden, size = w2.shape
    out = torch.empty(tokens, hidden, dtype=x.dtype)
    entry("int8_experts")(
        *(x.data_ptr(), x.stride(0), *(tensor.data_ptr() for tensor in tables)),
        *(experts.data_ptr(), weights.data_ptr(), out.data_ptr(), tokens, chosen, hidden, size),
        *(count, first, weights.dtype == torch.float32, torch.get_num_threads()),
    )
    return out
