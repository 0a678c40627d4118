"""Which elements of a tensor differ, by their bits, from those of a copy; the copy takes them."""

import torch
from torch import Tensor

from rollout.kernels.op import op
from rollout.weights import INTEGERS

_CHUNK = 1 << 22  # elements compared at once, so that temporaries stay small


@op
def diff_update(copy: Tensor, new: Tensor, most: int) -> tuple[Tensor, Tensor] | None:
    """Bring ``copy`` to ``new``, bit for bit, and say where they differed.

    ``(positions, values)``: flat row-major int64 positions, ascending, and ``new``'s values there.
    None when more than ``most`` differ; the copy is brought up all the same. Both tensors:
    contiguous, of equal dtype and shape; the dtype has 1, 2, 4 or 8 bytes.
    """
    kind = INTEGERS[new.dtype.itemsize]
    before, after = copy.view(-1).view(kind), new.reshape(-1).view(kind)
    found: list[Tensor] = []
    count = 0
    for start in range(0, len(after), _CHUNK):
        differs = before[start : start + _CHUNK] != after[start : start + _CHUNK]
        where = differs.nonzero().flatten()
        count += len(where)
        if count > most:
            before.copy_(after)
            return None
        found.append(where + start)
    positions = torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=new.device)
    values = after[positions]
    before[positions] = values
    return positions, values.view(new.dtype)
