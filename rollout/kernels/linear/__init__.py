"""A linear map whose weight may lie in memory in another order than row-major."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout.kernels.native import library
from rollout.kernels.op import op
from rollout.weights import Box, Layout


@op
def linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    """``x @ W^T + bias`` where ``W`` is the logical [N, K] = ``shape`` that ``storage`` holds.

    x: [..., K]; storage: ``layout.storage_shape(shape)``; bias: [N] or None; returns [..., N].
    """
    assert x.shape[-1] == shape[1], f"x {x.shape} does not fit a weight of shape {shape}"
    weight = storage if layout.name == "plain" else layout.read(storage, shape, Box.full(shape))
    return F.linear(x, weight, bias)


def reads_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights of ``dtype`` on ``device`` are read faster from tiles than row by row.

    So they are with bfloat16 instructions, and on vectors of AVX2 and AVX-512, where torch's own
    ``F.linear`` of bfloat16 is slow; narrower vectors (Arm's) were not measured.
    """
    if device.type != "cpu" or dtype != torch.bfloat16:
        return False
    from rollout.kernels.linear import cpu

    return library() is not None and (cpu.level() > 0 or cpu.vector_width() >= cpu.AVX2_WIDTH)
