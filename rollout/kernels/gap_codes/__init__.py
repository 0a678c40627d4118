"""Ascending positions as gaps: how many are passed over before each one.

Wire format. A gap is coded in ``width`` bytes, little-endian, 1, 2 or 4 for all of a list; the
largest code means "that many, and no position yet".
"""

import torch
from torch import Tensor

from rollout.kernels.op import op

WIDTHS = (1, 2, 4)
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # of as many bits; the sign is a bit, too
MOST = 1 << 62  # elements; sums of gaps cannot overflow before they are seen to be too large


@op
def encode_gaps(positions: Tensor) -> tuple[Tensor, int]:
    """The codes, as uint8 bytes, and the width in which they are shortest.

    positions: int64 [n], ascending without repetition from 0.
    """
    gaps = positions.diff(prepend=positions.new_full((1,), -1)) - 1
    skipped = torch.stack([(gaps // escape(w)).sum() for w in WIDTHS]).tolist()
    lengths = {w: w * (len(gaps) + n) for w, n in zip(WIDTHS, skipped, strict=True)}
    width = min(WIDTHS, key=lambda w: lengths[w])
    skips = gaps // escape(width)
    codes = gaps.new_full((lengths[width] // width,), escape(width))
    codes[(skips + 1).cumsum(0) - 1] = gaps - skips * escape(width)
    return codes.to(_KINDS[width]).view(torch.uint8), width


@op
def decode_gaps(codes: Tensor, width: int, count: int, numel: int) -> Tensor | None:
    """The positions, int64 [count]; None unless the codes are exactly those of ``count`` positions
    below ``numel``.

    codes: uint8, a multiple of ``width`` bytes; they may be a stranger's.
    """
    assert width in WIDTHS
    aligned = codes if codes.storage_offset() % width == 0 else codes.clone()
    gaps = aligned.view(_KINDS[width]).to(torch.int64) & escape(width)
    if not len(gaps) <= numel <= MOST or (count and not len(gaps)):
        return None
    found = (gaps != escape(width)).nonzero().flatten()
    # The last code is a position's, too: what is passed over behind it says nothing.
    if len(found) != count or (len(gaps) and not (count and int(found[-1]) == len(gaps) - 1)):
        return None
    positions = gaps.cumsum(0)[found] + torch.arange(count, device=gaps.device)
    if count and not 0 <= int(positions[-1]) < numel:
        return None
    return positions


def escape(width: int) -> int:
    """The largest code of a width, which is no gap."""
    return int((1 << 8 * width) - 1)
