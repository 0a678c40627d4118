"""Native ``ssd_scan``."""

import ctypes

import torch
from torch import Tensor

from rollout.kernels.native import BF16, entry
from rollout.kernels.native.prototypes import structure
from rollout.kernels.op import in_rows
from rollout.kernels.ssd_scan import ssd_scan as op

MAX_STATE = 512  # as in ssd.c


def ssd_scan(
    x: Tensor,
    b: Tensor,
    c: Tensor,
    steps: Tensor,
    rates: Tensor,
    skips: Tensor,
    states: Tensor,
    slots: Tensor,
    query_starts: Tensor,
    context_lens: Tensor,
) -> Tensor:
    bf16, (tokens, heads, dim) = BF16.get(x.dtype), x.shape
    groups, size = b.shape[1:]
    alike = x.dtype == b.dtype == c.dtype and states.dtype == torch.float32
    given = x, b, c, steps, rates, skips, states, slots, query_starts, context_lens
    if bf16 is None or not (alike and states.is_contiguous()) or size > MAX_STATE:
        return op.reference(*given)
    assert b.shape == c.shape == (tokens, groups, size)
    assert heads % groups == 0
    assert states.shape[1:] == (heads, size, dim)
    assert steps.shape == (tokens, heads)
    assert rates.shape == skips.shape == (heads,)
    assert len(slots) == len(context_lens) == len(query_starts) - 1
    x, b, c = (in_rows(of) for of in (x, b, c))
    steps, rates, skips = (of.float().contiguous() for of in (steps, rates, skips))
    slots, starts, lengths = (i.int().contiguous() for i in (slots, query_starts, context_lens))
    out = torch.empty(x.shape, dtype=x.dtype)
    each = (x, b, c, out, steps, rates, skips, states, slots, starts, lengths)
    problem = structure("Ssd")(
        *(of.data_ptr() for of in each),
        *(x.stride(0), b.stride(0), c.stride(0), len(slots), groups, heads, size, dim),
    )
    if entry("ssd_scan")(ctypes.addressof(problem), bf16, torch.get_num_threads()):
        return op.reference(*given)  # there is padding
    return out
