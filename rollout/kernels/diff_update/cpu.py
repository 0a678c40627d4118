"""Native ``diff_update``: one pass over both; equal cache lines are passed over."""

import torch
from torch import Tensor

from rollout.kernels.native import address, entry


def diff_update(copy: Tensor, new: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    assert copy.is_contiguous()
    assert new.is_contiguous()
    assert (copy.shape, copy.dtype) == (new.shape, new.dtype)
    size = new.element_size()
    assert size in (1, 2, 4, 8)
    room = max(0, min(most, new.numel()))
    # Only what is written takes memory.
    positions, values = torch.empty(room, dtype=torch.int64), torch.empty(room, dtype=new.dtype)
    count = entry("diff_update")(
        *(address(copy), address(new), new.numel(), size, room, positions.data_ptr()),
        values.data_ptr(),
    )
    if count < 0:
        copy.copy_(new)
        return None
    return positions[:count].clone(), values[:count].clone()
