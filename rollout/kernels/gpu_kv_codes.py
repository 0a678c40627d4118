"""What Triton kernels do with ``kv_codes``: by integers, as every GPU and the interpreter can."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import narrow
from rollout.kernels.kv_codes import SMALLEST

_SMALLEST = tl.constexpr(SMALLEST)


def as_integers(pages: Tensor) -> Tensor:
    """The same memory, of codes as kernels take it."""
    return pages.view(torch.uint8) if pages.dtype == torch.float8_e4m3fn else pages


@triton.jit
def from_codes(codes, dtype: tl.constexpr, KIND: tl.constexpr):
    """What they stand for, which ``dtype`` holds exactly; of pages without codes what they hold."""
    if KIND == 0:
        return codes
    if KIND == 1:
        return narrow(codes.to(tl.float32), dtype)
    bits = codes.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)  # with an exponent that is 8 too small
    return narrow(half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0, dtype)


@triton.jit
def scales_of(most, bad, KIND: tl.constexpr):
    """Of heads whose largest elements are ``most``: their scales, and what elements are
    multiplied by. bad: 0, or NaN where an element is not finite.
    """
    largest = most * 0.0 + (127.0 if KIND == 1 else 448.0)
    most = tl.maximum(most, _SMALLEST)
    return tl.div_rn(most, largest) + bad, tl.div_rn(largest, most)


@triton.jit
def to_codes(scaled, KIND: tl.constexpr):
    """The nearest codes, to even."""
    if KIND == 1:
        codes = _nearest(scaled).to(tl.int8)
    else:
        bits = scaled.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
        code = tl.where(size < 0x3C800000, _nearest(tl.abs(scaled) * 512.0), normal)
        codes = (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return codes


@triton.jit
def _nearest(x):
    """The nearest integers, to even; |x| < 2^22."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
