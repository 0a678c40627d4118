"""Triton ``swap_tensors``: one launch per storage; each byte is read once and written once."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import as_words, launch
from rollout.kernels.swap_tensors import swap_tensors as op

_BLOCK = 2048  # words of one program


def swap_tensors(a: Tensor, b: Tensor) -> None:
    dense = a.is_contiguous() and b.is_contiguous() and a.device == b.device
    if not dense or a.shape != b.shape or a.dtype != b.dtype:
        return op.reference(a, b)
    x, y = as_words(a.view(-1), b.view(-1))
    launch(_swap, (triton.cdiv(x.numel(), _BLOCK),), x, y, x.numel(), BLOCK=_BLOCK)
    return None


@triton.jit
def _swap(a, b, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(a + at, mask=at < count)
    y = tl.load(b + at, mask=at < count)
    tl.store(a + at, y, mask=at < count)
    tl.store(b + at, x, mask=at < count)
