"""A linear map whose rows have the same bits in any batch."""

import torch
from torch import Tensor

from rollout.kernels.linear import linear
from rollout.kernels.op import op
from rollout.weights import Layout


@op
def batch_invariant_linear(
    x: Tensor, storage: Tensor, bias: Tensor | None, layout: Layout, shape: tuple[int, int]
) -> Tensor:
    """``linear``, where a row's bits depend on that row and the weight alone.

    Arguments and result as in ``linear``, whose sums may have another order. This reference takes
    row by row; torch's own order still depends on the number of threads, the native one on nothing.
    """
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return linear.reference(x, storage, bias, layout, shape)
    each = [linear.reference(row, storage, bias, layout, shape) for row in rows[:, None]]
    return torch.cat(each).view(*x.shape[:-1], shape[0])
