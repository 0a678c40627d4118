"""A region as native code reads many of them: lines of columns, in one row of a flat table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from torch import Tensor

from rollout.weights import Shape

LARGE = 1 << 20  # elements: what has more goes by itself, over all threads

Dim = tuple[int, int, int]  # size, and two strides


def lines_of(shape: Shape, first: Sequence[int], second: Sequence[int]) -> tuple[Dim, Dim] | None:
    """Lines and columns of a strided region in two orders at once, with the strides of each.

    ``first`` is dense along the columns where it can be; None where it takes more dimensions.
    """
    dims: list[Dim] = []
    for size, a, b in zip(shape, first, second, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1] == size * a and dims[-1][2] == size * b:
            dims[-1] = dims[-1][0] * size, a, b
        else:
            dims.append((size, a, b))
    if len(dims) > 2:
        return None
    lines, columns = [(1, 0, 0), (1, 1, 1), *dims][-2:] if len(dims) != 1 else ((1, 0, 0), dims[0])
    return (columns, lines) if lines[1] == 1 and lines[0] > 1 else (lines, columns)


def places_of(regions: Sequence[Tensor]) -> tuple[object, ...]:
    """Where tensors lie and how: equal for two calls only where the rows of one serve the other."""
    return tuple(
        (x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_neg(), x.untyped_storage().nbytes())
        for x in regions
    )


class RegionRows:
    """Rows of one call, ``words`` 64-bit integers each; ``owners``: whose region each is."""

    def __init__(self) -> None:
        self.words, self.owners = array("q"), array("q")

    def add(self, owner: int, *words: int) -> None:
        self.words.extend(words)
        self.owners.append(owner)

    @property
    def address(self) -> int:
        return self.words.buffer_info()[0]

    def __len__(self) -> int:
        return len(self.owners)
