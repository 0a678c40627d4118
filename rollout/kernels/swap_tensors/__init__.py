"""Two storages change their contents."""

import torch
from torch import Tensor

from rollout.kernels.op import op

_CHUNK = 4 << 20  # elements in memory a third time


@op
def swap_tensors(a: Tensor, b: Tensor) -> None:
    """``a, b = b, a`` bit for bit, in place; of one shape and dtype, dense, without a common byte.

    Where they lie on different devices, ``a`` names the one that works.
    """
    assert a.shape == b.shape, f"{a.shape} and {b.shape} differ"
    assert a.dtype == b.dtype, f"{a.dtype} and {b.dtype} differ"
    pieces = zip(torch.split(a.view(-1), _CHUNK), torch.split(b.view(-1), _CHUNK), strict=True)
    for x, y in pieces:
        kept = x.clone()
        x.copy_(y)
        y.copy_(kept)
