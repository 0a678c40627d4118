"""Which elements of two tensors differ by their bits."""

import torch
from torch import Tensor

from rollout.kernels.op import op

_CHUNK = 1 << 22  # elements compared at once, so that temporaries stay small
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@op
def changed(old: Tensor, new: Tensor, most: int) -> Tensor | None:
    """Flat row-major positions, int64 and ascending, where the bits differ.

    None when more than ``most`` do. ``old`` and ``new``: contiguous, of equal dtype and shape; the
    dtype has 1, 2, 4 or 8 bytes.
    """
    kind = _INTEGERS[new.dtype.itemsize]
    before, after = old.reshape(-1).view(kind), new.reshape(-1).view(kind)
    found: list[Tensor] = []
    count = 0
    for start in range(0, len(after), _CHUNK):
        differs = before[start : start + _CHUNK] != after[start : start + _CHUNK]
        where = differs.nonzero().flatten()
        count += len(where)
        if count > most:
            return None
        found.append(where + start)
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=new.device)
