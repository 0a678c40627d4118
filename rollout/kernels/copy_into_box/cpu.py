"""Native ``copy_into_box`` of large boxes, plain or of whole tiles."""

import torch
from torch import Tensor

from rollout.kernels.copy_into_box import copy_into_box as op
from rollout.kernels.native import address, entry
from rollout.kernels.nontemporal_copy import nontemporal_copy
from rollout.kernels.nontemporal_copy.cpu import LEAST
from rollout.weights import Box, Layout, PlainLayout, Shape, TileLayout

_LINE = 64  # bytes
_ROWS = 16  # of a tile, as C has it
_WORD = 4  # bytes of an output's inputs in a tile


def copy_into_box(storage: Tensor, shape: Shape, box: Box, value: Tensor, layout: Layout) -> None:
    if isinstance(layout, PlainLayout):
        nontemporal_copy(storage[box.slices], value.reshape(box.shape))
    elif isinstance(layout, TileLayout) and _is_known(storage, box, value, layout):
        _write_tiles(storage, box, value.reshape(box.shape), layout.inputs)
    else:
        op.reference(storage, shape, box, value, layout)


def _is_known(storage: Tensor, box: Box, value: Tensor, layout: TileLayout) -> bool:
    large = value.nbytes >= LEAST and value.dtype == storage.dtype and value.device.type == "cpu"
    words = layout.rows == _ROWS and layout.inputs * storage.element_size() == _WORD
    aligned = storage.is_contiguous() and not storage.data_ptr() % _LINE
    return large and words and aligned and layout.is_of_whole_tiles(box)


def _write_tiles(storage: Tensor, box: Box, value: Tensor, each: int) -> None:
    if value.stride(1) != 1 or value.stride(0) % each or value.data_ptr() % _WORD:
        value = value.clone(memory_format=torch.contiguous_format)
    (n0, k0), (n1, k1) = box.starts, box.stops
    into = storage[n0 // _ROWS : n1 // _ROWS, k0 // each : k1 // each]
    entry("write_tiles")(
        *(into.data_ptr(), into.stride(0) // each, address(value), value.stride(0) // each),
        *(into.shape[0], into.shape[1], torch.get_num_threads()),
    )
