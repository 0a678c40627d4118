"""Native ``nontemporal_copy`` of large tensors whose last dimensions are dense on both sides."""

import torch
from torch import Tensor

from rollout.kernels.native import address, entry
from rollout.kernels.nontemporal_copy import nontemporal_copy as op

LEAST = 1 << 20  # bytes; less than this stays in a cache
_LEAST_ROW = 1 << 10


def nontemporal_copy(into: Tensor, values: Tensor) -> Tensor:
    assert into.shape == values.shape
    rows = None
    if into.nbytes >= LEAST and into.dtype == values.dtype and values.device.type == "cpu":
        rows = _rows(into, values)
    if rows is None:
        return op.reference(into, values)
    count, size, to_stride, from_stride = rows
    entry("nontemporal_copy")(
        *(into.data_ptr(), to_stride, address(values), from_stride, count, size),
        torch.get_num_threads(),
    )
    return into


def _rows(into: Tensor, values: Tensor) -> tuple[int, int, int, int] | None:
    """How many stretches of how many bytes, and their distance on either side in bytes."""
    size = into.element_size()
    if into.is_contiguous() and values.is_contiguous():
        return 1, into.nbytes, 0, 0
    if into.dim() != 2 or into.stride(1) != 1 or values.stride(1) != 1:
        return None
    row = into.shape[1] * size
    if row < _LEAST_ROW:
        return None
    return into.shape[0], row, into.stride(0) * size, values.stride(0) * size
