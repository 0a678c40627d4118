"""Triton ``copy_slots``: one launch, and no copy in between."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.copy_slots import copy_slots as op
from rollout.kernels.gpu_launch import as_words, launch

_BLOCK = 2048  # words of one program


def copy_slots(states: Tensor, pairs: Tensor) -> None:
    if not (states.is_contiguous() and states.numel()):
        return op.reference(states, pairs)
    [held] = as_words(states.flatten(2) if states.dim() > 2 else states[..., None])
    layers, slots, count = held.shape
    grid = len(pairs), layers, triton.cdiv(count, _BLOCK)
    launch(_copy, grid, held, pairs.contiguous(), slots, count, BLOCK=_BLOCK)
    return None


@triton.jit
def _copy(states, pairs, slots, count, BLOCK: tl.constexpr):
    pair, layer = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    source, target = tl.load(pairs + pair * 2), tl.load(pairs + pair * 2 + 1)
    held = tl.load(states + (layer * slots + source) * count + at, mask=at < count, other=0)
    tl.store(states + (layer * slots + target) * count + at, held, mask=at < count)
