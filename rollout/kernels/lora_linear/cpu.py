"""Native ``lora_linear``: both products of all rows in one call."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.lora_linear import lora_linear as op
from rollout.kernels.lora_linear import lora_work
from rollout.kernels.native import BF16, entry


def lora_linear(
    y: Tensor,
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scales: Tensor,
    bounds: tuple[int, ...],
    rows: Tensor,
    tiles: Tensor,
) -> None:
    bf16 = BF16.get(y.dtype)
    if bf16 is None or not y.dtype == x.dtype == a.dtype == b.dtype:
        op.reference(y, x, a, b, scales, bounds, rows, tiles)
        return
    assert y.stride(1) == x.stride(1) == 1
    assert a.is_contiguous() and b.is_contiguous() and tiles.is_contiguous()  # noqa: PT018
    assert scales.dtype == torch.float32
    assert rows.dtype == tiles.dtype == torch.int32
    _, parts, rank, inputs = a.shape
    edges, work = torch.tensor(bounds), lora_work(rows, a)
    pointers = (y, x, a, b, scales, edges, rows, tiles, work)
    entry("lora_linear")(
        *(t.data_ptr() for t in pointers),
        *(y.stride(0), x.stride(0), len(tiles), len(rows), parts, rank, inputs, y.shape[1]),
        *(bf16, torch.get_num_threads()),
    )
