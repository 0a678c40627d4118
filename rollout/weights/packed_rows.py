"""Rows of a quantised weight in bytes: the codes of each, and behind them its scales.

Codes that a file or a trainer has travel so, as one tensor [N, width] of uint8, and are held as
they are: see ``rollout.weights.quantization`` for codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.weights.box import Box, Shape
from rollout.weights.quantization import SCHEMES, Scheme

CODES = {torch.float8_e4m3fn: "e4m3", torch.int8: "int8"}  # of files and trainers


@dataclass(frozen=True, slots=True)
class FileCodes:
    """What a file has of a weight in the grid of ``scheme``: ``read`` gives codes and scales of a
    box of whole cells, as they are held; of stacked experts a box of one of them, as it lies there.
    """

    scheme: Scheme
    read: Callable[[Box], tuple[Tensor, Tensor]]


def packed_shape(shape: Shape, scheme: Scheme) -> Shape:
    """Of the bytes of a weight [N, K]."""
    return shape[0], shape[1] // scheme.per_byte + _scale_bytes(scheme.cells(shape), scheme)


def packed_boxes(shape: Shape, scheme: Scheme, box: Box) -> tuple[Box, Box]:
    """Where codes and scales of ``box``, whole cells of a weight [N, K], lie in its bytes."""
    (n0, k0), (n1, k1) = box.starts, box.stops
    columns, behind = scheme.cell(shape)[1], shape[1] // scheme.per_byte
    first, last = k0 // columns, -(-k1 // columns)
    return (
        Box((n0, k0 // scheme.per_byte), (n1, k1 // scheme.per_byte)),
        Box((n0, behind + _scale_bytes(first, scheme)), (n1, behind + _scale_bytes(last, scheme))),
    )


def pack_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes [n, k / per_byte] and scales [n, cells] as bytes [n, width]."""
    return torch.cat((codes.view(torch.uint8), as_bytes(scales)), dim=1)


def unpack_rows(rows: Tensor, shape: Shape, scheme: Scheme) -> tuple[Tensor, Tensor]:
    """The inverse, of some rows [n, width] of a weight of ``shape``."""
    behind = shape[1] // scheme.per_byte
    codes, scales = rows[:, :behind], rows[:, behind:].clone(memory_format=torch.contiguous_format)
    return codes.view(scheme.storage_dtype), scales.view(scheme.scale_dtype)


def as_bytes(scales: Tensor) -> Tensor:
    """[n, cells] -> uint8 [n, bytes of its scales]."""
    return scales.contiguous().view(torch.uint8).view(len(scales), -1)


def scale_grid(
    shape: Shape, scales: Shape, block: tuple[int, int] | None
) -> tuple[int, int] | None:
    """Rows and columns that share a scale in a file, (0, 0): all; None for scales that do not fit.

    ``scales``: their shape; ``block``: of those by block, if any.
    """
    if len(shape) != 2:
        return None
    if block is not None:
        fits = scales == (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
        return block if fits else None
    if scales in ((), (1,), (1, 1)):
        return 0, 0
    return (1, max(1, shape[1])) if scales in ((shape[0], 1), (shape[0],)) else None


def scheme_of(dtype: torch.dtype, shape: Shape, grid: tuple[int, int]) -> tuple[Scheme, ...]:
    """The schemes that can hold codes of ``dtype`` of a weight [N, K] with those scales."""
    found = []
    for scheme in SCHEMES.values():
        rows, columns = scheme.cell(shape)
        # A cell may be as large as the weight, or larger: then it is the whole of it.
        same = grid == (0, 0) or all(
            mine == theirs or min(mine, theirs) >= size
            for mine, theirs, size in zip((rows, columns), grid, shape, strict=True)
        )
        if same and scheme.codes == CODES.get(dtype):
            found.append(scheme)
    return tuple(found)


def row_scales(scales: Tensor, shape: Shape, grid: tuple[int, int], scheme: Scheme) -> Tensor:
    """Scales of a file as ``scheme`` holds them: float32 [N, cells]."""
    wide = scales.float()
    if grid == (0, 0):
        return wide.reshape(1, 1).expand(shape[0], scheme.cells(shape)).contiguous()
    wide = wide.reshape(-1, -(-shape[1] // grid[1])).repeat_interleave(grid[0], dim=0)
    return wide[: shape[0]].contiguous()


def floats_of(codes: Tensor, scales: Tensor, grid: tuple[int, int], box: Box) -> Tensor:
    """The float32 that ``codes`` of ``box`` stand for; ``scales``: float32, the one that all share,
    or those of the cells that the box cuts.
    """
    if grid == (0, 0):
        return codes.float() * scales.reshape(())
    for axis, size in enumerate(grid):
        first = box.starts[axis] // size
        places = torch.arange(box.starts[axis], box.stops[axis], device=scales.device)
        scales = scales.index_select(axis, places // size - first)
    return scales.mul_(codes.float())


def _scale_bytes(cells: int, scheme: Scheme) -> int:
    return cells * scheme.scale_dtype.itemsize
