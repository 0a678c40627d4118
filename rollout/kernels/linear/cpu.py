"""Native ``linear`` for bfloat16 weights in tiles; everything else is torch's own."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.linear import linear as op
from rollout.kernels.native import entry
from rollout.weights import Layout, TileLayout

TILE_ROWS = 16
AVX2_WIDTH = 8
LEVELS = ("plain vectors", "AVX512-BF16 dot products", "AMX tiles")  # by ``level``


@functools.cache
def level() -> int:
    """The best of this machine: 2 AMX, 1 AVX512-BF16, 0 plain vectors."""
    return int(entry("linear_level")())


@functools.cache
def vector_width() -> int:
    """float32 lanes of the vectors that the native code was compiled for: 16, 8 or 4."""
    return int(entry("vector_width")())


def linear(
    x: Tensor,
    storage: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    *,
    at_level: int | None = None,
) -> Tensor:
    """``at_level`` pins a lower level than the machine's, for tests."""
    if layout.name == "plain":
        return F.linear(x, storage, bias)
    if not takes(x, storage, bias, layout):
        return op.reference(x, storage, bias, layout, shape)
    return multiply_tiles(x, storage, bias, shape, gated=False, at_level=at_level)


def takes(x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout) -> bool:
    """Whether ``multiply_tiles`` is made for these arguments."""
    tiles = isinstance(layout, TileLayout) and layout.rows == TILE_ROWS and layout.inputs == 2
    alike = x.dtype == storage.dtype == torch.bfloat16 and (bias is None or bias.dtype == x.dtype)
    return tiles and alike and x.shape[-1] > 0


def multiply_tiles(
    x: Tensor,
    storage: Tensor,
    bias: Tensor | None,
    shape: tuple[int, int],
    *,
    gated: bool,
    at_level: int | None,
    segments: int = 1,
    wide: bool = False,
) -> Tensor:
    """``linear``, or ``gated_linear`` where ``gated``, of what ``takes`` accepts.

    ``segments``, ``wide``: as of ``batch_invariant_linear``; segments have an even length.
    """
    n, k = shape
    assert x.shape[-1] == k, f"x {x.shape} does not fit a weight of shape {shape}"
    assert storage.is_contiguous(), "the tiles of a weight lie one after the other"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, k).contiguous()
    dtype = torch.float32 if wide else x.dtype
    out = torch.empty((*x.shape[:-1], n // 2 if gated else n), dtype=dtype)
    if not out.numel():
        return out
    entry("linear")(
        *(flat.data_ptr(), flat.stride(0), storage.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), len(flat), n, k, gated),
        *(segments, wide, level() if at_level is None else at_level, torch.get_num_threads()),
    )
    return out
