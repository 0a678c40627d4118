"""Native ``linear`` for bfloat16 weights in tiles; everything else is torch's own."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.linear import linear as op
from rollout.kernels.native import entry, library
from rollout.weights import Layout, TileLayout

_LEVELS = ("plain vectors", "AVX512-BF16", "AMX")
_TILE_ROWS = 16


def available() -> bool:
    return library() is not None


@functools.cache
def level() -> int:
    """Which of ``_LEVELS`` this machine runs at best."""
    return int(entry("linear_level", "", "i")())


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
    n, k = shape
    rows_of_tile = layout.rows if isinstance(layout, TileLayout) else 0
    alike = x.dtype == storage.dtype == torch.bfloat16 and (bias is None or bias.dtype == x.dtype)
    if not alike or rows_of_tile != _TILE_ROWS or not x.shape[-1]:
        return op.reference(x, storage, bias, layout, shape)
    assert x.shape[-1] == k, f"x {x.shape} does not fit a weight of shape {shape}"
    assert storage.is_contiguous(), "the tiles of a weight lie one after the other"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, k).contiguous()
    out = torch.empty((*x.shape[:-1], n), dtype=x.dtype)
    if not out.numel():
        return out
    entry("linear", "plppplllii")(
        flat.data_ptr(),
        flat.stride(0),
        storage.data_ptr(),
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
        len(flat),
        n,
        k,
        level() if at_level is None else at_level,
        torch.get_num_threads(),
    )
    return out
