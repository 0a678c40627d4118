"""What Triton kernels read of weights in fewer bits, by integers; see ``weights.quantization``."""

from __future__ import annotations

import triton
import triton.language as tl

from rollout.kernels.gpu_kv_codes import from_codes
from rollout.weights.quantization import Scheme

#: kinds of codes, as kernels take them; 0: no codes
KINDS = {"int8": 1, "e4m3": 2, "e2m1": 3}


def columns_at_once(scheme: Scheme, most: int) -> int:
    """Of a row, a power of two: no more than ``most``, and than one scale is for."""
    return min(most, scheme.columns) if scheme.columns else most


@triton.jit
def code_values(codes, column, KIND: tl.constexpr):
    """float32, what ``codes`` stand for before their scales; ``column``: of each, for which of a
    byte's two it is.
    """
    if KIND == 3:
        code = (codes.to(tl.int32) >> ((column % 2) * 4)) & 15
        size = code & 7  # exponents of 1 for 0.5, so for 1 and 1.5, and so on; 0 has none
        bits = ((size >> 1) + 126) << 23 | (size & 1) << 22
        value = tl.where(size < 2, size * 0.5, bits.to(tl.float32, bitcast=True))
        value *= tl.where(code < 8, 1.0, -1.0)
    else:
        value = from_codes(codes, tl.float32, KIND)
        if KIND == 2:
            value = tl.where((codes & 0x7F) == 0x7F, float("nan"), value)
    return value


@triton.jit
def scale_values(scales, KIND: tl.constexpr):
    """float32 of scales as they are kept."""
    if KIND == 3:  # an exponent; 0 stands for a number below the smallest that is normal
        stored = scales.to(tl.int32)
        bits = tl.where(stored == 0, 1 << 22, stored << 23)
        scales = tl.where(stored == 255, float("nan"), bits.to(tl.float32, bitcast=True))
    return scales
