"""Native ``digest``: strided boxes, tiles among them, are read where they lie."""

import ctypes

import torch
from torch import Tensor

from rollout.kernels.digest import EXPONENTS
from rollout.kernels.digest.strides import Dim, collapse, offsets, row_major
from rollout.kernels.native import address, entry
from rollout.weights import Box, Shape

TILE_ROWS = 16


def digest(values: Tensor, shape: Shape, box: Box, nonfinite: list[int] | None = None) -> int:
    assert tuple(values.shape) == box.shape, f"values {values.shape} do not fill {box}"
    assert box.fits(shape), f"{box} is not inside {shape}"
    size = values.element_size()
    assert size in (1, 2, 4, 8), f"no digest of {values.dtype}"
    if not values.numel():
        return 0
    strides = row_major(shape)
    position = sum(a * s for a, s in zip(box.starts, strides, strict=True))
    dims = collapse(list(zip(values.shape, values.stride(), strides, strict=True)))
    exponent = 0 if nonfinite is None else EXPONENTS.get(values.dtype, 0)
    count = ctypes.c_uint64()
    if _are_tiles(dims) and size in (2, 4):
        total = _digest_tiles(values, dims, position, exponent, count)
        if nonfinite is not None:
            nonfinite[0] += count.value
        return total
    *outer, rows, columns = dims
    run = entry("digest")
    threads, total, base = torch.get_num_threads(), 0, address(values)
    for memory, ahead in offsets(outer):
        total += run(
            *(base + memory * size, size, rows[0], columns[0], rows[1], columns[1]),
            *(position + ahead, rows[2], threads, exponent, ctypes.addressof(count)),
        )
        if nonfinite is not None:
            nonfinite[0] += count.value
    return total % 2**64


def _are_tiles(dims: list[Dim]) -> bool:
    """Whether these are tiles of a ``TileLayout(16)`` or a run of them: [tiles, 16, pairs, 2]."""
    return (
        len(dims) in (3, 4)
        and dims[-1] == (2, 1, 1)
        and dims[-2][1:] == (2 * TILE_ROWS, 2)
        and dims[-3][:2] == (TILE_ROWS, 2)
    )


def _digest_tiles(
    values: Tensor, dims: list[Dim], position: int, exponent: int, count: ctypes.c_uint64
) -> int:
    tiles, rows, pairs, _ = dims if len(dims) == 4 else [(1, 0, 0), *dims]
    return int(
        entry("digest_tiles")(
            *(address(values), values.element_size(), tiles[0], pairs[0], tiles[1], position),
            *(tiles[2], rows[2], torch.get_num_threads(), exponent, ctypes.addressof(count)),
        )
    )
