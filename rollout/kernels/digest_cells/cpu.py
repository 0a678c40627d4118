"""Native ``digest_cells``: one call, over a table of regions."""

from __future__ import annotations

import torch
from torch import Tensor

from rollout.kernels.digest import EXPONENTS
from rollout.kernels.native import address, entry
from rollout.weights import Shape


def digest_cells(cells: Tensor, corners: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    n, rows, columns = cells.shape
    cells, (high, wide), size = cells.contiguous(), shape, cells.element_size()
    table = torch.empty(n, 8, dtype=torch.int64)  # of ``Region`` in native/digest.c
    table[:, 0] = address(cells) + torch.arange(n) * (rows * columns * size)
    table[:, 1] = corners[:, 0] * wide + corners[:, 1]
    table[:, 2] = (high - corners[:, 0]).clamp_(0, rows)
    table[:, 3] = (wide - corners[:, 1]).clamp_(0, columns)
    table[:, 4:] = torch.tensor([columns, 1, wide, 1])
    sums, bad = (torch.zeros(n, dtype=torch.int64) for _ in range(2))
    entry("digest_regions")(
        *(table.data_ptr(), n, size, 0, torch.get_num_threads()),
        *(EXPONENTS.get(cells.dtype, 0), sums.data_ptr(), bad.data_ptr()),
    )
    return sums, bad
