"""A matrix cut into cells: what shares a scale where a weight is quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.weights.box import Shape


@dataclass(frozen=True, slots=True)
class CellGrid:
    """A matrix of ``shape`` [N, K] in cells of ``rows`` x ``columns``, which lie row-major.

    Cells at its far edges may reach beyond it; what a cell has there is zero and counts for
    nothing.
    """

    shape: Shape
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: Shape, cell: tuple[int, int]) -> CellGrid:
        """Of cells that are cut down to a matrix that is smaller."""
        return cls(shape, min(cell[0], shape[0]), min(cell[1], shape[1]))

    @property
    def cell(self) -> tuple[int, int]:
        return self.rows, self.columns

    @property
    def across(self) -> int:
        """Cells beside one another."""
        return -(-self.shape[1] // self.columns)

    @property
    def count(self) -> int:
        return -(-self.shape[0] // self.rows) * self.across

    def holding(self, positions: Tensor) -> Tensor:
        """The numbers of the cells, int64 and ascending, that hold flat ``positions``."""
        n = positions // self.shape[1]
        k = positions - n * self.shape[1]
        numbers: Tensor = torch.unique(n // self.rows * self.across + k // self.columns)
        return numbers

    def corners(self, numbers: Tensor) -> Tensor:
        """First row and column of cells; int64 [n, 2]."""
        above = numbers // self.across
        left = numbers - above * self.across
        return torch.stack((above * self.rows, left * self.columns), dim=1)

    def gather(self, matrix: Tensor, numbers: Tensor) -> Tensor:
        """Cells of ``matrix`` [N, K]; [n, rows, columns], a copy."""
        (high, wide), across = self.shape, self.across
        down, right = -high % self.rows, -wide % self.columns
        if down or right:
            matrix = torch.nn.functional.pad(matrix, (0, right, 0, down))
        cells = matrix.view(-1, self.rows, across, self.columns).transpose(1, 2)
        return cells[numbers // across, numbers % across]

    def places(self, corners: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Row [n, rows, 1] and column [n, 1, columns] of each element of the cells at ``corners``,
        and which elements lie in the matrix: bool [n, rows, columns].
        """
        row = corners[:, 0, None, None] + torch.arange(self.rows, device=corners.device)[:, None]
        column = corners[:, 1, None, None] + torch.arange(self.columns, device=corners.device)
        return row, column, (row < self.shape[0]) & (column < self.shape[1])
