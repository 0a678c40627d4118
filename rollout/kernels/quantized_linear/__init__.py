"""A linear map whose weight is held in fewer bits; see ``rollout.weights.quantization``."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.dequantize import dequantize
from rollout.kernels.op import op
from rollout.kernels.silu_mul import silu_mul
from rollout.weights import Box, Layout
from rollout.weights.quantization import Scheme

LARGEST = {"int8": 127.0, "e4m3": 448.0}  # of an input's codes


@op
def quantized_linear(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    scheme: Scheme,
    gated: bool = False,
) -> Tensor:
    """``x @ W^T + bias`` of W [N, K] = ``shape``; returns [..., N] in the dtype of x.

    codes: as ``layout`` has them; scales: [N, cells]; bias: [N] or None. ``gated``: then
    ``silu(first half) * second half``, [..., N / 2], rounded as if apart.
    int8 and fp8 (a scale for each row of W): each row of x is quantised, too, by its largest value:
    ``scale_x scale_w sum(codes of x * codes of w)``, of exact sums (int8), or (fp8) of sums in
    float32. Others: W is dequantised to the dtype of x, and multiplied as ``linear``.
    """
    assert x.shape[-1] == shape[1], f"x {x.shape} does not fit a weight of shape {shape}"
    plain = plain_codes(codes, layout, shape, scheme)
    if scheme.columns:
        out = F.linear(x, dequantize(plain, scales, scheme, x.dtype), bias)
        return silu_mul.reference(out) if gated else out
    quantized, factors = quantize_rows(x, scheme)
    if scheme.codes == "int8":
        sums = F.linear(quantized.double(), plain.double()).float()
    else:
        sums = F.linear(quantized.float(), dequantize(plain, None, scheme, torch.float32))
    out = sums * (factors * scales[:, 0])
    out = (out if bias is None else out + bias.float()).to(x.dtype)
    return silu_mul.reference(out) if gated else out


def quantize_rows(x: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """Inputs [..., K] as codes (int8, or float8_e4m3fn), and a float32 scale of each: [..., 1]."""
    wide = x.float()
    most = LARGEST[scheme.codes]
    # Not by a number: a GPU would multiply by its inverse, and codes differ from a CPU's.
    factors = (wide.abs().amax(dim=-1, keepdim=True) / wide.new_full((), most)).clamp_min(
        torch.finfo(torch.float32).tiny
    )
    scaled = wide / factors
    if scheme.codes == "int8":
        return scaled.round().clamp(-most, most).nan_to_num().to(torch.int8), factors
    return scaled.clamp(-most, most).to(torch.float8_e4m3fn), factors


def plain_codes(codes: Tensor, layout: Layout, shape: tuple[int, int], scheme: Scheme) -> Tensor:
    """[N, K / per_byte], row by row."""
    if layout.name == "plain":
        return codes
    stored = (shape[0], shape[1] // scheme.per_byte)
    return layout.read(codes, stored, Box.full(stored))
