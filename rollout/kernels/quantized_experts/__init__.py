"""The experts of a mixture whose weights are held in fewer bits, each by itself."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from rollout.kernels.dequantize import dequantize
from rollout.kernels.fused_experts import ExpertsLora, by_expert, fused_experts
from rollout.kernels.op import op
from rollout.kernels.quantized_linear import quantized_linear
from rollout.weights import PLAIN
from rollout.weights.quantization import Scheme


@op
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
    """``fused_experts`` of codes w13 [E, 2 I, H], w2 [E, H, I] and their scales s13, s2, per row.

    int8: each product is a ``quantized_linear``, whose inputs are quantised, too. Others: the
    experts that are wanted are dequantised for this call.
    """
    if scheme.codes == "int8":
        products = (
            partial(_product, w13, s13, b13, scheme),
            partial(_product, w2, s2, b2, scheme),
        )
        return by_expert(x, experts, weights, first, len(w13), products, clamped, squared, lora)
    local = experts - first
    outside = (local < 0) | (local >= len(w13))
    local = local.masked_fill(outside, -1)
    wanted, places = local.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    kept = int((wanted < 0).sum())  # those of other ranks stand first, if there are any
    wanted = wanted[kept:]
    w13 = dequantize(w13[wanted], s13[wanted], scheme, x.dtype)
    w2 = dequantize(w2[wanted], s2[wanted], scheme, x.dtype)
    b13, b2 = (None if bias is None else bias[wanted] for bias in (b13, b2))
    lora = None if lora is None else lora.among(wanted)
    return fused_experts(x, w13, w2, places, weights, kept, b13, b2, clamped, squared, lora)


def _product(
    codes: Tensor, scales: Tensor, biases: Tensor | None, scheme: Scheme, expert: int, x: Tensor
) -> Tensor:
    rows, inputs = codes.shape[1:]
    bias = None if biases is None else biases[expert]
    return quantized_linear(x, codes[expert], scales[expert], bias, PLAIN, (rows, inputs), scheme)
