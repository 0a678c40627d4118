"""Ascending positions as gaps: how many are passed over before each one.

Wire format. A gap is coded in ``width`` bytes, little-endian, 1, 2 or 4 for all of a list; the
largest code means "that many, and no position yet".
"""

import numpy as np
import torch
from torch import Tensor

from rollout.kernels.op import op

WIDTHS = (1, 2, 4)
MOST = 1 << 62  # elements; sums of gaps cannot overflow before they are seen to be too large


@op
def encode_gaps(positions: Tensor) -> tuple[Tensor, int]:
    """The codes, as uint8 bytes, and the width in which they are shortest.

    positions: int64 [n], ascending without repetition from 0.
    """
    gaps = np.diff(positions.cpu().numpy(), prepend=-1) - 1
    lengths = {w: w * (len(gaps) + int((gaps // escape(w)).sum())) for w in WIDTHS}
    width = min(WIDTHS, key=lambda w: lengths[w])
    skips = gaps // escape(width)
    codes = np.full(lengths[width] // width, escape(width), f"<u{width}")
    codes[np.cumsum(skips + 1) - 1] = gaps - skips * escape(width)
    return torch.from_numpy(codes.view(np.uint8)), width


@op
def decode_gaps(codes: Tensor, width: int, count: int, numel: int) -> Tensor | None:
    """The positions, int64 [count]; None unless the codes are exactly those of ``count`` positions
    below ``numel``.

    codes: uint8, a multiple of ``width`` bytes; they may be a stranger's.
    """
    assert width in WIDTHS
    gaps = codes.cpu().numpy().view(f"<u{width}")
    ends = gaps != escape(width)
    complete = bool(ends[-1]) if len(gaps) else not count
    if not len(gaps) <= numel <= MOST or int(ends.sum()) != count or not complete:
        return None
    positions = np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(count, dtype=np.int64)
    if count and not 0 <= int(positions[-1]) < numel:
        return None
    return torch.from_numpy(positions)


def escape(width: int) -> int:
    """The largest code of a width, which is no gap."""
    return int((1 << 8 * width) - 1)
