"""Native ``batch_invariant_linear``: tiles as ``linear`` has them, else ``batch_invariant.c``."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.batch_invariant_linear import batch_invariant_linear as op
from rollout.kernels.linear import cpu as tiles
from rollout.kernels.native import BF16, entry
from rollout.weights import Box, Layout


def batch_invariant_linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    if tiles.takes(x, storage, bias, layout):
        return tiles.multiply_tiles(x, storage, bias, shape, gated=False, at_level=None)
    bf16 = BF16.get(x.dtype)
    alike = x.dtype == storage.dtype and (bias is None or bias.dtype == x.dtype)
    if bf16 is None or not alike:
        return op.reference(x, storage, bias, layout, shape)
    plain = layout.name == "plain"
    weight = (storage if plain else layout.read(storage, shape, Box.full(shape))).contiguous()
    outputs, inputs = shape
    assert x.shape[-1] == inputs, f"x {x.shape} does not fit a weight of shape {shape}"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
    if not out.numel():
        return out
    entry("batch_invariant_linear")(
        *(flat.data_ptr(), flat.stride(0), weight.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), len(flat), outputs, inputs),
        *(bf16, torch.get_num_threads()),
    )
    return out
