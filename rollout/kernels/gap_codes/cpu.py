"""Native gap codes: one pass to measure, one to write; one to read."""

import torch
from torch import Tensor

from rollout.kernels.gap_codes import MOST, WIDTHS
from rollout.kernels.native import entry


def encode_gaps(positions: Tensor) -> tuple[Tensor, int]:
    assert positions.dtype == torch.int64
    positions = positions.contiguous()
    lengths = torch.empty(len(WIDTHS), dtype=torch.int64)
    entry("gap_lengths")(positions.data_ptr(), len(positions), lengths.data_ptr())
    sizes = dict(zip(WIDTHS, lengths.tolist(), strict=True))
    width = min(WIDTHS, key=lambda w: sizes[w])
    codes = torch.empty(sizes[width], dtype=torch.uint8)
    entry("encode_gaps")(positions.data_ptr(), len(positions), width, codes.data_ptr())
    return codes, width


def decode_gaps(codes: Tensor, width: int, count: int, numel: int) -> Tensor | None:
    assert codes.dtype == torch.uint8
    assert width in WIDTHS
    assert len(codes) % width == 0
    if not count <= len(codes) // width <= numel <= MOST:
        return None
    codes = codes.contiguous()
    positions = torch.empty(count, dtype=torch.int64)
    found = entry("decode_gaps")(
        codes.data_ptr(), len(codes) // width, width, count, numel, positions.data_ptr()
    )
    return positions if found else None
