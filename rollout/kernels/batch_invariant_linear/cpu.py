"""Native ``batch_invariant_linear``: tiles as ``linear`` has them, else ``batch_invariant.c``."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.batch_invariant_linear import batch_invariant_linear as op
from rollout.kernels.batch_invariant_linear import finish_sums as finish
from rollout.kernels.batch_invariant_linear import segment_sums as apart
from rollout.kernels.linear import cpu as tiles
from rollout.kernels.native import BF16, entry
from rollout.weights import Box, Layout


def batch_invariant_linear(
    x: Tensor,
    storage: Tensor,
    bias: Tensor | None,
    layout: Layout,
    shape: tuple[int, int],
    segments: int = 1,
    wide: bool = False,
    *,
    at_level: int | None = None,
) -> Tensor:
    """``at_level`` pins a lower level than the machine's, for tests."""
    bias = None if wide else bias
    if tiles.takes(x, storage, bias, layout) and shape[1] % (2 * segments) == 0:
        return tiles.multiply_tiles(
            x, storage, bias, shape, gated=False, at_level=at_level, segments=segments, wide=wide
        )
    bf16 = BF16.get(x.dtype)
    alike = x.dtype == storage.dtype and (bias is None or bias.dtype == x.dtype)
    if bf16 is None or not alike:
        return op.reference(x, storage, bias, layout, shape, segments, wide)
    plain = layout.name == "plain"
    weight = (storage if plain else layout.read(storage, shape, Box.full(shape))).contiguous()
    outputs, inputs = shape
    assert x.shape[-1] == inputs, f"x {x.shape} does not fit a weight of shape {shape}"
    assert inputs % segments == 0, f"{inputs} inputs make no {segments} equal segments"
    flat = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, inputs).contiguous()
    out = torch.empty((*x.shape[:-1], outputs), dtype=torch.float32 if wide else x.dtype)
    if not out.numel():
        return out
    entry("batch_invariant_linear")(
        *(flat.data_ptr(), flat.stride(0), weight.data_ptr()),
        *(None if bias is None else bias.data_ptr(), out.data_ptr(), len(flat), outputs, inputs),
        *(segments, wide, bf16, torch.get_num_threads()),
    )
    return out


def segment_sums(x: Tensor, weight: Tensor, segments: int) -> Tensor:
    bf16, (outputs, inputs) = BF16.get(x.dtype), weight.shape
    if bf16 is None or x.dtype != weight.dtype:
        return apart.reference(x, weight, segments)
    assert inputs % segments == 0, f"{inputs} inputs make no {segments} equal segments"
    x, weight = x.contiguous(), weight.contiguous()
    out = torch.empty((segments, len(x), outputs), dtype=torch.float32)
    if out.numel():
        entry("batch_invariant_linear")(
            *(x.data_ptr(), inputs, weight.data_ptr(), None, out.data_ptr()),
            *(len(x), outputs, inputs, segments, 2, bf16, torch.get_num_threads()),
        )
    return out


def finish_sums(
    sums: Tensor, bias: Tensor | None, dtype: torch.dtype, out: Tensor | None = None
) -> Tensor:
    bf16 = BF16.get(dtype)
    alike = sums.dtype == torch.float32 and (bias is None or bias.dtype == dtype)
    if bf16 is None or not alike:
        return finish.reference(sums, bias, dtype, out)
    sums, columns = sums.contiguous(), sums.shape[-1]
    out = torch.empty(sums.shape, dtype=dtype) if out is None else out
    assert out.is_contiguous(), "the result is dense"
    entry("finish_sums")(
        *(sums.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()),
        *(sums.numel() // max(1, columns), columns, bf16),
    )
    return out
