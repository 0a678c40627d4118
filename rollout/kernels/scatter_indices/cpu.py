"""Native ``scatter_indices`` of matrices and vectors, plain or tiled: no division but per row."""

import torch
from torch import Tensor

from rollout.kernels.native import entry
from rollout.kernels.scatter_indices import scatter_indices as op
from rollout.weights import Box, Layout, PlainLayout, Shape, TileLayout, WeightSlot
from rollout.weights.positions import Kept


def scatter_indices(
    positions: Tensor, slot: WeightSlot, shape: Shape, layout: Layout
) -> tuple[Kept, Tensor]:
    known = isinstance(layout, PlainLayout | TileLayout)
    flat = 1 <= len(slot.shape) == len(shape) <= 2 and slot.take.shape == slot.put.shape
    if not (known and flat and len(positions)):
        return op.reference(positions, slot, shape, layout)
    assert positions.dtype == torch.int64
    positions = positions.contiguous()
    (row, column), (end_row, end_column) = _matrix(slot.take)
    (put_row, put_column), _ = _matrix(slot.put)
    tile_rows = layout.rows if isinstance(layout, TileLayout) else 0
    kept, places = torch.empty_like(positions), torch.empty_like(positions)
    count = entry("scatter_indices")(
        *(positions.data_ptr(), len(positions), slot.shape[-1], row, end_row, column, end_column),
        *(put_row, put_column, shape[-1], tile_rows, kept.data_ptr(), places.data_ptr()),
    )
    if count == len(positions):
        return slice(0, count), places
    return kept[:count], places[:count]


def _matrix(box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The box of a vector as that of a matrix of one row."""
    if len(box.starts) == 2:
        return box.starts, box.stops
    return (0, *box.starts), (1, *box.stops)
