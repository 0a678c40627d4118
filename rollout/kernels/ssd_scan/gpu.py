"""Triton ``ssd_scan``: some columns of one head's state of one sequence per program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout.kernels.gpu_launch import FLOATS, held_columns, launch, narrow, power_of_2
from rollout.kernels.op import in_rows
from rollout.kernels.ssd_scan import ssd_scan as op


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
    tokens, heads, dim = x.shape
    groups, size = b.shape[1:]
    alike = x.dtype == b.dtype == c.dtype and x.dtype in FLOATS
    if not (alike and states.dtype == torch.float32 and states.is_contiguous()):
        where = slots, query_starts, context_lens
        return op.reference(x, b, c, steps, rates, skips, states, *where)
    assert b.shape == c.shape == (tokens, groups, size)
    assert states.shape[1:] == (heads, size, dim)
    assert steps.shape == (tokens, heads)
    x, b, c = in_rows(x), in_rows(b), in_rows(c)
    steps, rates, skips = (of.float().contiguous() for of in (steps, rates, skips))
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = power_of_2(size)
    columns = held_columns(rows, dim)
    launch(
        _scan,
        (len(slots), heads, triton.cdiv(dim, columns)),
        *(x, b, c, out, steps, rates, skips, states, slots, query_starts, context_lens),
        *(x.stride(0), b.stride(0), c.stride(0), heads, heads // groups, size, dim),
        ROWS=rows,
        COLUMNS=columns,
    )
    return out


@triton.jit
def _scan(
    x,
    b,
    c,
    out,
    steps,
    rates,
    skips,
    states,
    slots,
    starts,
    lengths,
    x_row,
    b_row,
    c_row,
    heads,
    each,
    size,
    dim,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    s, head = tl.program_id(0), tl.program_id(1)
    r, p = tl.arange(0, ROWS), tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    row, column = r < size, p < dim
    first = tl.load(starts + s).to(tl.int64)
    stop = tl.load(starts + s + 1).to(tl.int64)
    own = tl.load(slots + s).to(tl.int64)
    has_state = r[:, None] * 0 + own >= 0
    kept = has_state & (r[:, None] * 0 + tl.load(lengths + s) > stop - first)
    slot = own * heads + head
    at = states + slot * size * dim + r[:, None] * dim + p[None, :]
    live = row[:, None] & column[None, :]
    state = tl.load(at, mask=live & kept, other=0.0)
    rate, skip = tl.load(rates + head), tl.load(skips + head)
    group = head // each * size + r
    for t in range(first, stop):
        key = tl.load(b + t * b_row + group, mask=row, other=0.0).to(tl.float32)
        query = tl.load(c + t * c_row + group, mask=row, other=0.0).to(tl.float32)
        value = tl.load(x + t * x_row + head * dim + p, mask=column, other=0.0).to(tl.float32)
        step = tl.load(steps + t * heads + head)
        state = state * tl.exp(rate * step) + key[:, None] * (value * step)[None, :]
        read = tl.sum(state * query[:, None], 0) + value * skip
        here = out + (t * heads + head) * dim + p
        tl.store(here, narrow(read, out.dtype.element_ty), mask=column)
    tl.store(at, state, mask=live & has_state)
