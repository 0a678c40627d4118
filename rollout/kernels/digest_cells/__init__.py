"""The digests of many cells of one matrix."""

import torch
from torch import Tensor

from rollout.kernels.digest import EXPONENTS, mix
from rollout.kernels.op import op
from rollout.weights import INTEGERS, Shape
from rollout.weights.cells import CellGrid


@op
def digest_cells(cells: Tensor, corners: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """For each of ``cells`` [n, rows, columns] its digest as a part of a matrix of ``shape``, and
    how many of its elements are NaN or infinite; both int64 [n], see ``digest``.

    corners: int64 [n, 2], row and column where each cell begins; what it has beyond the matrix
    counts for nothing.
    """
    rows, columns = cells.shape[1:]
    row, column, inside = CellGrid(shape, rows, columns).places(corners)
    bits = cells.detach().view(INTEGERS[cells.dtype.itemsize])
    sums = mix(bits, row * shape[1] + column).masked_fill_(~inside, 0).sum((1, 2))
    exponent = EXPONENTS.get(cells.dtype)
    if exponent is None:
        return sums, torch.zeros_like(sums)
    bad = ((bits.long() & exponent) == exponent) & inside
    return sums, bad.sum((1, 2))
