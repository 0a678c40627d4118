"""Keys and values in 8 bits: each token's, of each head, by a scale of its own.

No range is measured ahead, so that nothing of it can be of other weights than the keys are.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # code of each dtype
KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as kernels call them
SMALLEST = 1e-30  # of what is the largest of a head's elements: zeros have a scale, too


def to_codes(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] as codes of ``dtype`` and scales: float32 [...]. ``codes * scale`` is near x: in
    int8 within half a scale, in float8 within a sixteenth of an element or half of its least step.

    The largest code stands for the largest element; a NaN or an infinity makes all of x NaN.
    """
    wide = x.float()
    most = wide.abs().amax(-1).clamp_min(SMALLEST)
    scaled = wide * (LARGEST[dtype] / most)[..., None]
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), most / LARGEST[dtype]


def kind_of(pages: Tensor) -> int:
    """Of codes, as kernels call it; 0: there are none."""
    return KINDS.get(pages.dtype, 0)


def are_pages(dtype: torch.dtype, pages: Tensor, scales: Tensor | None) -> bool:
    """Whether a kernel takes ``pages`` [blocks, KH, block, D]: dense, of ``dtype`` itself, or codes
    with dense ``scales``, whose shape must fit.
    """
    if scales is None:
        return pages.dtype == dtype and pages.is_contiguous()
    assert scales.shape == pages.shape[:3], f"{scales.shape} for pages {pages.shape}"
    known = pages.dtype in LARGEST and scales.dtype == torch.float32
    return known and pages.is_contiguous() and scales.is_contiguous()
